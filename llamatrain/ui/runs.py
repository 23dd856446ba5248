"""The runs of a folder, and the process of the one that goes on.

A run is a child process of its own, `python -m llamatrain ...`: it is stopped by the signal that Ctrl-C sends, which
saves it, and its end is not that of the page. What the page shows is read from the folder of the run, so runs of the
command line are shown as well.
"""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import llamatrain
from llamatrain.checkpoints.filenames import BEST, can_resume
from llamatrain.checkpoints.new_run_dir import create_next_folder
from llamatrain.checkpoints.run_folder import RUNS
from llamatrain.errors import FileError, LlamatrainError, UsageError
from llamatrain.platform.files import read_at
from llamatrain.platform.locks import try_lock
from llamatrain.report.html import charts_section, run_page, samples_section, summary_section
from llamatrain.report.run_data import METRICS, REPORT_FILE, RunData, read_run_data
from llamatrain.ui.files import resolve_inside

USABLE = ("adapter.gguf", "model.gguf", BEST)  # what can be talked to and exported
# -P: modules are not searched in the folder, whose files may be anybody's
PROGRAM = (sys.executable, "-P", "-m", "llamatrain")
SEARCHED = (str(Path(llamatrain.__file__).resolve().parent.parent), os.environ.get("PYTHONPATH"))
LOG_BYTES = 1 << 14  # the end of the log that is shown
# What Ctrl-C is for the child alone: in a group of its own, the one in the terminal reaches the server only.
STOP: int = getattr(signal, "CTRL_BREAK_EVENT", signal.SIGINT)
APART: dict[str, Any] = (
    {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}
    if sys.platform == "win32"
    else {"start_new_session": True}
)


@dataclass
class Child:
    """The process of a run."""

    folder: Path
    words: list[str]  # of its command line
    process: "subprocess.Popen[bytes]"
    log: IO[bytes]
    is_stopping: bool = False

    @property
    def is_running(self) -> bool:
        """True until the process has ended."""
        return self.process.poll() is None

    def stop(self) -> None:
        """Make the run save and end; the second time, make it exit at once."""
        self.is_stopping = True
        with suppress(ProcessLookupError):
            self.process.send_signal(STOP)

    def read_log(self) -> list[str]:
        """Return the last lines that the process has printed."""
        descriptor = self.log.fileno()
        size = os.fstat(descriptor).st_size
        text = read_at(descriptor, LOG_BYTES, max(0, size - LOG_BYTES)).decode("utf-8", "replace")
        lines = text.splitlines()
        return lines[1:] if size > LOG_BYTES else lines

    @property
    def error(self) -> str:
        """The message of a process that failed."""
        code = self.process.poll()
        if code in (None, 0, 130) or (self.is_stopping and code in (-STOP, 128 + STOP)):
            return ""
        lines = self.read_log()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        last = next((line for line in reversed(lines) if line.strip()), "")
        return errors[-1] if errors else f"the process ended with code {code}" + (f": {last}" if last else "")


class Runs:
    """The runs below a folder. At most one is started at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._children = dict[Path, Child]()  # by the resolved folder; the last process of each
        self._lock = threading.RLock()  # a signal may come while `close` has it
        self._closed = False
        self._read = dict[Path, tuple[object, RunData]]()

    @property
    def children(self) -> Sequence[Child]:
        """The processes that were started here."""
        return [*self._children.values()]

    # ---- starting and stopping ---------------------------------------------

    def start(self, command: str, words: Sequence[str], out: str = "", overwrite: bool = False) -> str:
        """Start a run, and return its folder."""
        with self._lock:
            self._check_free()
            if out and not overwrite and (self.root / out / METRICS).is_file():
                raise FileError(
                    f"out: {out} already contains a run; choose another folder, resume the run, or switch on overwrite",
                    code="run-exists",
                )
            folder = Path(out) if out else create_next_folder(self.root / RUNS, command)
            where = [] if out else [f"--out={self._name(folder)}"]
            return self._spawn(folder, [command, *where, *words])

    def resume(self, place: str, iters: str = "") -> str:
        """Resume a run, and return its folder."""
        with self._lock:
            self._check_free()
            folder = self._find(place)
            command = read_run_data(folder).command
            if command not in ("finetune", "from-scratch"):
                raise FileError(f"{place}: its config.toml does not name its command", code="not-a-run")
            more = [f"--iters={iters}"] if iters else []
            return self._spawn(folder, [command, f"--resume={self._name(folder)}", *more])

    def stop(self, place: str) -> None:
        """Make a run save and end, as Ctrl-C does; it ends at once if it was asked before."""
        child = self._children.get(self._find(place))
        if child is None or not child.is_running:
            raise UsageError(f"{place}: this run was not started here, or has ended", code="not-running")
        child.stop()

    def close(self) -> list[Child]:
        """Stop the run that goes on, if any, and return it; afterwards none is started.

        A second call makes it exit at once.
        """
        with self._lock:
            self._closed = True
        running = [child for child in self.children if child.is_running]
        for child in running:
            child.stop()
        return running

    def _check_free(self) -> None:
        if self._closed:
            raise UsageError("the server is ending", code="closed")
        for child in self.children:
            if child.is_running:
                raise UsageError(
                    f"a run goes on in {self._name(child.folder)}; stop it, or wait until it ends",
                    code="busy",
                )

    def _spawn(self, folder: Path, words: list[str]) -> str:
        key = real_path(self.root / folder)
        log = tempfile.TemporaryFile()  # noqa: SIM115 (the child's record owns it)
        process = subprocess.Popen(
            [*PROGRAM, *words],
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, SEARCHED))},
            **APART,
        )
        if before := self._children.pop(key, None):
            before.log.close()
        self._children[key] = Child(folder, words, process, log)
        return self._name(folder)

    # ---- what they are -----------------------------------------------------

    def list(self) -> list[dict[str, Any]]:
        """Return the runs with their states, the newest first."""
        folders = {*self._children}
        for pattern in ("*", f"{RUNS}/*"):
            for path in self.root.glob(f"{pattern}/{METRICS}"):
                with suppress(FileError):
                    folders.add(resolve_inside(self.root, str(path.parent.relative_to(self.root))))
        rows = [self._summary(folder) for folder in folders if folder.is_dir() or folder in self._children]
        return sorted(rows, key=lambda row: -row["changed"])

    def describe(self, place: str) -> dict[str, Any]:
        """Return everything that the page shows of a run."""
        folder = self._find(place)
        child, run = self._children.get(folder), self._load(folder)
        files = [
            {"name": name, "path": f"{self._name(folder)}/{name}", "size": size} for name, size in run.files
        ]
        names = {name for name, _ in run.files}
        base = str(run.options.get("base") or "")
        return {
            **self._summary(folder),
            "command": run.command,
            "base": self._name(Path(base)) if base else "",
            "iters": run.iters,
            "line": shlex.join(["llamatrain", *child.words]) if child else "",
            "log": child.read_log() if child else [],
            "memory": resident_size(child.process.pid) if child and child.is_running else None,
            "files": files,
            "results": [name for name in USABLE if name in names],
            "summary": summary_section(run) if run.figures.step else "",
            "charts": charts_section(run.figures),
            "samples": samples_section(run.samples),
        }

    def draw_page(self, place: str) -> str:
        """Return the whole page of a run."""
        return run_page(self._load(self._find(place)))

    def _summary(self, folder: Path) -> dict[str, Any]:
        """Return name, state and progress of a run."""
        child, run = self._children.get(folder), self._load(folder)
        if child and not child.is_running:
            with suppress(OSError):
                folder.rmdir()  # only if it is empty: the run was refused
        metrics = folder / METRICS
        step, iters, error = run.figures.step, run.iters, child.error if child else ""
        if child and child.is_running:
            state = "stopping" if child.is_stopping else "running" if step else "starting"
        elif error:
            state = "failed"
        elif not run.ended and is_locked(folder):
            state = "running elsewhere"
        else:
            state = "finished" if iters is not None and step >= iters else "stopped"
        resumable = folder.is_dir() and state in ("stopped", "failed", "finished") and can_resume(folder)
        seconds = run.figures.seconds
        return {
            "folder": self._name(folder),
            "state": state,
            "error": error,
            "step": step,
            "iters": iters,
            "loss": run.figures.last_value("loss"),
            "left": (iters - step) * seconds if iters and seconds and state == "running" else None,
            "resumable": resumable,
            "changed": metrics.stat().st_mtime if metrics.exists() else time.time(),
        }

    def _load(self, folder: Path) -> RunData:
        """Read a run, unless its files are as they were."""
        stamps = []
        for name in (METRICS, REPORT_FILE, "config.toml"):
            with suppress(OSError):
                status = (folder / name).stat()
                stamps.append((name, status.st_size, status.st_mtime_ns))
        known = self._read.get(folder)
        if known is None or known[0] != stamps:
            known = self._read[folder] = stamps, read_run_data(folder)
        return known[1]

    def _find(self, place: str) -> Path:
        """Return the folder of a run below the root, or of one that was started here."""
        if not isinstance(place, str) or "\0" in place:
            raise UsageError("folder must be a path", code="invalid-option")
        folder = real_path(self.root / place)
        if folder in self._children:
            return folder
        folder = resolve_inside(self.root, place)
        if not (folder / METRICS).is_file():
            raise FileError(f"{place}: this folder contains no run", code="not-a-run")
        return folder

    def _name(self, place: Path) -> str:
        """Return a path as the page shows it: relative to the root, if it is below."""
        path, root = real_path(self.root / place), real_path(self.root)
        return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)


def real_path(path: Path) -> Path:
    """Return a path without links; those that form a circle stay, where `resolve` would raise."""
    return Path(os.path.realpath(path))


def is_locked(folder: Path) -> bool:
    """Return True if a process trains in a folder."""
    with suppress(OSError, LlamatrainError), try_lock(folder) as free:
        return not free
    return False


def resident_size(pid: int) -> int | None:
    """Return the bytes of a process that are resident, or None where the system does not say."""
    if sys.platform != "win32":
        with suppress(OSError, ValueError, IndexError):
            return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None
