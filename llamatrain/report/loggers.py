"""Loggers that receive the lines of metrics.jsonl, each with a library that is imported only if requested."""

import csv
import json
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TextIO

from llamatrain.errors import FileError, UsageError
from llamatrain.io.atomic_write import AtomicFile

MODULES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
IDS_FILE = "loggers.json"  # in the run's folder: its ids in each library
PROJECT = "llamatrain"
KEYS = ("project", "name", "id")
FLUSH_INTERVAL = 10.0  # seconds
MAX_MESSAGE = 200  # characters of a library's error
Line = dict[str, Any]


def check_installed(names: Iterable[str]) -> None:
    """Raise if the library of a logger is not installed."""
    for name in names:
        if (module := MODULES.get(name)) and not find_spec(module):
            raise UsageError(
                f"--log {name} needs {module}, which is not installed; run pip install {module}, or "
                "use --log csv",
                code="logger-not-installed",
            )


@dataclass(frozen=True, kw_only=True)
class LoggerContext:
    """The facts about a run that loggers need."""

    folder: Callable[[], Path]  # the present one, as it may move
    name: str
    note: str
    options: dict[str, Any]
    step: int  # the last step of earlier processes
    lines: Callable[[], Iterator[Line]]  # all lines so far


class Logger(Protocol):
    """A destination for lines of metrics."""

    wants_history: bool  # it needs the lines of earlier processes too

    def write(self, line: Line) -> None:
        """Write a line."""

    def flush(self) -> None:
        """Write what is buffered."""

    def close(self, failed: bool) -> None:
        """Finish the log of a run, which may have failed."""


class Loggers:
    """The requested loggers, created with the first line. A logger that fails is dropped with a warning."""

    def __init__(self, names: Iterable[str], run: LoggerContext, warn: Callable[[str], None]) -> None:
        self.names, self.run, self.warn = list(dict.fromkeys(names)), run, warn
        self.open: dict[str, Logger] | None = None
        self.failed = False  # the run failed

    def write(self, line: Line) -> None:
        """Write a line that metrics.jsonl already contains."""
        first, self.open = self.open is None, self.open or {}
        for name in self.names if first else list(self.open):
            with self._drop_on_error(name):
                if not first:
                    self.open[name].write(line)
                    continue
                logger = self.open[name] = LOGGERS[name](self.run)
                for past_line in self.run.lines() if logger.wants_history else [line]:
                    logger.write(past_line)

    def flush(self) -> None:
        """Flush all loggers."""
        for name, logger in list((self.open or {}).items()):
            with self._drop_on_error(name):
                logger.flush()

    def close(self) -> None:
        """Close all loggers."""
        for name, logger in list((self.open or {}).items()):
            with self._drop_on_error(name):
                logger.close(self.failed)
        self.open = {}

    @contextmanager
    def _drop_on_error(self, name: str) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:
            if self.open:
                self.open.pop(name, None)
            message = " ".join(str(error).split())[:MAX_MESSAGE] or type(error).__name__
            self.warn(f"--log {name}: {message}; logging there has stopped (metrics.jsonl has all lines)")


def tagged_numbers(line: Line) -> dict[str, float]:
    """Return the numbers of a line under their usual tags, such as train/loss."""
    numbers = {
        key: value.item() if hasattr(value, "item") else value for key, value in line.items() if key != "step"
    }
    return {tag(key): float(value) for key, value in numbers.items() if isinstance(value, int | float)}


def tag(key: str) -> str:
    """Return the usual tag of a number, such as val/loss for val_loss."""
    kind, underscore, name = key.partition("_")
    return f"{kind}/{name}" if underscore and kind in ("val", "retain") else f"train/{key}"


class Csv:
    """Writes metrics.csv: a row for each line; the file is rewritten when a line has a new column."""

    wants_history = True

    def __init__(self, run: LoggerContext) -> None:
        self.run = run
        self.file: TextIO | None = None
        self._begin()

    def _begin(self) -> None:
        """Start the file with its header."""
        if self.file:
            self.file.close()
            self.file = None
        self.names = list(dict.fromkeys(name for line in self.run.lines() for name in line))
        path = self.run.folder() / "metrics.csv"
        with AtomicFile(path) as file:
            file.write((",".join(self.names) + "\n").encode())
        self.file = file_of_rows = path.open("a", encoding="utf-8", newline="")
        self.rows = csv.writer(file_of_rows, lineterminator="\n")

    def write(self, line: Line) -> None:
        """Write a row."""
        if line.keys() <= {*self.names}:
            self.rows.writerow([csv_value(line.get(name)) for name in self.names])
        else:
            self._begin()
            for past_line in self.run.lines():  # including this one
                self.rows.writerow([csv_value(past_line.get(name)) for name in self.names])
        self.flush()

    def flush(self) -> None:
        """Flush the file."""
        if self.file:
            self.file.flush()

    def close(self, failed: bool) -> None:
        """Close the file."""
        if self.file:
            self.file.close()


def csv_value(value: Any) -> Any:
    """Return a value as CSV shows it."""
    if isinstance(value, bool):
        return json.dumps(value)
    return "" if value is None or (isinstance(value, float) and not math.isfinite(value)) else value


class TensorBoard:
    """Writes TensorBoard event files.

    Events of earlier processes after the checkpoint are marked as obsolete.
    """

    def __init__(self, run: LoggerContext) -> None:
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        folder = check_not_link(run.folder() / "tensorboard")
        exists = any(folder.glob("*tfevents*"))
        self.wants_history = not exists or not run.step  # without steps, they belong to a replaced run
        folder.mkdir(exist_ok=True)
        self.events, self.summaries, self.last_flush = event_pb2, summary_pb2, time.monotonic()
        self.file = EventsWriter(str(folder / "events"), f".{os.getpid()}.{secrets.token_hex(4)}")
        if exists:
            started = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write_event(0 if self.wants_history else run.step + 1, session_log=started)
        for tag, text in {"name": run.name, "note": run.note}.items():
            if text and self.wants_history:
                self._write_event(0, summary=summary.text(tag, text))

    def _write_event(self, step: int, **what: Any) -> None:
        self.file.write_event(self.events.Event(wall_time=time.time(), step=step, **what))

    def write(self, line: Line) -> None:
        """Write the numbers of a line."""
        value = self.summaries.Summary.Value
        values = [value(tag=tag, simple_value=number) for tag, number in tagged_numbers(line).items()]
        self._write_event(int(line["step"]), summary=self.summaries.Summary(value=values))
        if time.monotonic() - self.last_flush > FLUSH_INTERVAL:
            self.flush()

    def flush(self) -> None:
        """Flush the file."""
        self.last_flush = time.monotonic()
        self.file.flush()

    def close(self, failed: bool) -> None:
        """Close the file."""
        self.file.close()


class WandbLogger:
    """Logs to Weights & Biases, or to a library with the same interface."""

    def __init__(self, name: str, run: LoggerContext) -> None:
        self.library = import_module(name)
        ids, self.logged_steps = read_ids(run.folder()), 0
        self.wants_history = name not in ids
        check_not_link(run.folder() / name)
        own_ids = ids.setdefault(name, self._new_ids(name, run))
        write_ids(run.folder(), ids)
        notes = {"notes": run.note or None, "dir": str(run.folder())} if name == "wandb" else {}
        config = {**run.options, "note": run.note} if run.note and not notes else run.options
        with redirect_stdout(sys.stderr):
            run_handle = self.library.init(**own_ids, **notes, config=config, resume="allow")
        step = getattr(run_handle, "step", 0)
        if not self.wants_history and isinstance(step, int):
            self.logged_steps = step

    @staticmethod
    def _new_ids(name: str, run: LoggerContext) -> dict[str, str]:
        project = os.environ.get(f"{name.upper()}_PROJECT") or PROJECT
        if name == "wandb":
            return {"project": project, "name": run.name, "id": secrets.token_hex(4)}
        return {"project": project, "name": run.name}

    def write(self, line: Line) -> None:
        """Log a line, unless an earlier process did."""
        if line["step"] >= self.logged_steps:
            self.library.log(tagged_numbers(line), step=int(line["step"]))

    def flush(self) -> None:
        """Do nothing: the library flushes by itself."""

    def close(self, failed: bool) -> None:
        """Finish the run."""
        with redirect_stdout(sys.stderr):
            self.library.finish(**({"exit_code": int(failed)} if self.library.__name__ == "wandb" else {}))


def check_not_link(folder: Path) -> Path:
    """Return the folder; raise if it is a link that leads elsewhere."""
    if folder.is_symlink():
        raise FileError(f"{folder}: this is a link to another folder; remove it", code="logger-folder-link")
    return folder


def read_ids(folder: Path) -> dict[str, dict[str, str]]:
    """Read the ids of a run in each library; a damaged file has none."""
    with suppress(OSError, ValueError, RecursionError):
        ids = json.loads((folder / IDS_FILE).read_bytes()[:1000])
        if isinstance(ids, dict) and all(
            name in MODULES and is_valid_ids(entry) for name, entry in ids.items()
        ):
            return ids
    return {}


def is_valid_ids(entry: object) -> bool:
    """Return True if ids from a file, perhaps someone else's, are safe: they become file names."""
    return isinstance(entry, dict) and all(
        key in KEYS
        and isinstance(value, str)
        and value.isprintable()
        and not value.startswith(".")
        and not {*value} & {*"/\\"}
        for key, value in entry.items()
    )


def write_ids(folder: Path, ids: dict[str, dict[str, str]]) -> None:
    """Write the ids of a run in each library."""
    with AtomicFile(folder / IDS_FILE) as file:
        file.write(json.dumps(ids).encode())


LOGGERS: dict[str, Callable[[LoggerContext], Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": partial(WandbLogger, "wandb"),
    "trackio": partial(WandbLogger, "trackio"),
    "csv": Csv,
}
