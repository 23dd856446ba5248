"""Writes and reads metrics.jsonl: one JSON object per line, for each step and each validation."""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, BinaryIO, Protocol, Self

from llamatrain.errors import FileError
from llamatrain.io.atomic_write import AtomicFile, move_aside
from llamatrain.report import listener

FLUSH_INTERVAL = 0.2  # seconds that lines may stay in the buffer
MAX_LINE = 4096  # bytes of a line; ours have some 250
FLAGS = os.O_RDWR | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
SCORES = frozenset({"val_loss", "retain_loss"})  # keys of lines that a validation writes
# accepts NumPy numbers
ENCODE = json.JSONEncoder(allow_nan=False, default=lambda number: number.item()).encode


class LineSink(Protocol):
    """A receiver of lines."""

    failed: bool

    def write(self, line: dict[str, Any]) -> None:
        """Receive a line."""

    def flush(self) -> None:
        """Store all lines so far."""

    def close(self) -> None:
        """Finish."""


class Metrics:
    """The metrics file of a run, open for appending. A line is in the file after 0.2 s, or after `flush`.

    The file is created by `open` or the first line, with the lines of another file up to a step; if it is
    lost, the next `flush` recreates it. The validation of that step is left out if it is still due.
    """

    def __init__(
        self, path: str | Path, source: Path | None = None, step: int = 0, validation_due: bool = False
    ) -> None:
        self.path = Path(path)
        self.warn: Callable[[str], None] = lambda line: None
        self.sink: LineSink | None = None  # receives all lines as well
        self._source, self._step, self._validation_due = source, step, validation_due
        self._file: FileIO | None = None
        self._waiting = b""
        self._due = 0.0

    @classmethod
    def create(cls, path: str | Path) -> Self:
        """Create an empty file and replace an existing one."""
        return cls(path).open()

    @classmethod
    def resume(cls, path: str | Path, step: int) -> Self:
        """Open the file up to a step, without later lines or a partial last line."""
        return cls(path, Path(path), step).open()

    @property
    def has_history(self) -> bool:
        """True if there are lines of an earlier process."""
        return self._source is not None and self._source.is_file()

    def open(self) -> Self:
        """Create the file, if that was not done."""
        self._file = self._file or self._create_file(self._past_lines())
        return self

    def _past_lines(self) -> Iterator[bytes]:
        for raw, line in read_lines(self._source) if self._source else ():
            is_due = self._validation_due and not SCORES.isdisjoint(line)
            if line["step"] < self._step + (not is_due):
                yield raw.strip() + b"\n"

    def _create_file(self, lines: Iterable[bytes]) -> FileIO:
        with AtomicFile(self.path) as file:
            for line in lines:
                file.write(line)
        try:
            return FileIO(os.open(self.path, FLAGS), "r+")
        except OSError as error:
            raise self._write_error(error) from error

    def write(self, line: dict[str, Any]) -> None:
        """Add a line. NaN and infinity become null. What cannot be written waits for the next `flush`."""
        try:
            text = ENCODE(line)
        except ValueError:
            text = ENCODE({name: value if math.isfinite(value) else None for name, value in line.items()})
        self._waiting += text.encode() + b"\n"
        if (now := monotonic()) >= self._due:
            self._due = now + FLUSH_INTERVAL
            with suppress(OSError, FileError):
                self._write_waiting()
        if self.sink:
            self.sink.write(line)
        listener.notify(line)

    def _write_waiting(self) -> None:
        file = self.open()._file
        while file and self._waiting:
            self._waiting = self._waiting[file.write(self._waiting) :]

    def flush(self) -> None:
        """Write all lines to disk: call it before a checkpoint, which must not be ahead of them."""
        if not self._file and not self._waiting:
            return
        if self.sink:
            self.sink.flush()
        try:
            self._write_waiting()
            self._recreate_if_lost()
            os.fsync(self.open()._file.fileno())  # type: ignore[union-attr]
        except OSError as error:
            raise self._write_error(error) from error

    def _recreate_if_lost(self) -> None:
        """Create the file again if its name is gone or belongs to another file."""
        assert self._file
        with suppress(FileNotFoundError):
            if os.path.samestat(os.lstat(self.path), os.fstat(self._file.fileno())):
                return
            move_aside(self.path)
        file = self._create_file(raw for raw, _ in parse_lines(self._all_lines()))
        self._file.close()
        self._file = file
        self.warn(f"{self.path} was missing; it was created again")

    def copy_to(self, path: Path) -> "Metrics":
        """Return another file with all lines, if this one cannot be written any more."""
        copy = Metrics(path)
        copy._file = copy._create_file(raw for raw, _ in parse_lines(self._all_lines()))
        return copy

    def _all_lines(self) -> Iterator[bytes]:
        """Yield all lines of the run, including those not yet on disk."""
        last = b""
        if self._file:
            with os.fdopen(os.dup(self._file.fileno()), "rb") as file:
                file.seek(0)
                for last in read_pieces(file):
                    if last.endswith(b"\n"):
                        yield last
        else:
            yield from self._past_lines()
        yield from ((b"" if last.endswith(b"\n") else last) + self._waiting).splitlines(keepends=True)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Return all lines of the run, of earlier processes too; damaged ones are skipped."""
        with suppress(FileError):  # the next save reports it
            self.flush()
        return (line for _, line in parse_lines(self._all_lines()))

    def read(self) -> list[dict[str, Any]]:
        """Return all lines as a list."""
        return list(self.lines())

    def close(self) -> None:
        """Flush and close the file."""
        if self.sink:
            self.sink.close()
        if self._file and not self._file.closed:
            try:
                self.flush()
            finally:
                with suppress(OSError):  # the error was reported before
                    self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_error(self, error: OSError) -> FileError:
        return FileError(f"{self.path}: cannot be written: {error.strerror}", code="write-failed")


def read_lines(
    path: Path, warn: Callable[[str], None] = lambda line: None
) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield the lines of a file that are JSON objects with a step, raw and parsed; no file has no lines.

    `warn` is called if there are others, except for a partial last line.
    """
    read, first, damaged, torn = 0, 0, 0, False
    try:
        if path.is_file():  # opening a pipe would block
            with path.open("rb") as file:
                for read, piece in enumerate(read_pieces(file), 1):
                    line = parse_line(piece)
                    if line is not None:
                        yield piece, line
                    else:
                        first, damaged, torn = first or read, damaged + 1, not piece.endswith(b"\n")
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}", code="read-failed") from error
    if damaged > (torn and first == read):
        others = f" and {damaged - 1:,} others" if damaged > 1 else ""
        warn(f"{path}: skipped line {first:,}{others}, which has no metrics of a step")


def read_pieces(file: BinaryIO) -> Iterator[bytes]:
    """Yield lines, or pieces of lines that are too long."""
    return iter(lambda: file.readline(MAX_LINE), b"")


def parse_lines(pieces: Iterable[bytes]) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield the valid lines, raw and parsed."""
    return ((raw, line) for raw in pieces if (line := parse_line(raw)) is not None)


def parse_line(raw: bytes) -> dict[str, Any] | None:
    """Return a line, or None if it is invalid."""
    try:
        line = json.loads(raw.decode())
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and type(line.get("step")) is int else None
