"""metrics.jsonl: a JSON object a line for each step and each validation."""

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

WAIT = 0.2  # seconds that lines may lie in the buffer while steps follow fast
LONGEST = 4096  # bytes of a line that is read; ours have some 250
FLAGS = os.O_RDWR | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
ENCODE = json.JSONEncoder(
    allow_nan=False, default=lambda number: number.item()
).encode  # numbers of numpy are welcome


class LineSink(Protocol):
    """Whoever is told of each line, and that all lines so far are to stay."""

    failed: bool

    def write(self, line: dict[str, Any]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Metrics:
    """The file of a run, open for more lines. What was written lies in the file after 0.2 s, or after `flush`.

    It is made anew, with the lines of another up to a step, by `begin` or the first line; where it is lost, by the next `flush`.
    The validation of that step is not among them where it is still owed.
    """

    def __init__(
        self, path: str | Path, before: Path | None = None, step: int = 0, owed: bool = False
    ) -> None:
        self.path = Path(path)
        self.tell: Callable[[str], None] = lambda line: None
        self.also: LineSink | None = None  # where lines go besides
        self._before, self._step, self._owed = before, step, owed
        self._file: FileIO | None = None
        self._waiting = b""
        self._due = 0.0

    @classmethod
    def fresh(cls, path: str | Path) -> Self:
        """An empty file, in the place of what stood there."""
        return cls(path).begin()

    @classmethod
    def resumed(cls, path: str | Path, step: int) -> Self:
        """The file up to a step: later lines go, and so does whatever a killed process left half written."""
        return cls(path, Path(path), step).begin()

    @property
    def goes_on(self) -> bool:
        """Whether there are lines of an earlier process."""
        return self._before is not None and self._before.is_file()

    def begin(self) -> Self:
        self._file = self._file or self._made(self._kept())
        return self

    def _kept(self) -> Iterator[bytes]:
        for raw, line in lines_of(self._before) if self._before else ():
            if line["step"] < self._step + (not (self._owed and "val_loss" in line)):
                yield raw.strip() + b"\n"

    def _made(self, lines: Iterable[bytes]) -> FileIO:
        with AtomicFile(self.path) as file:
            for line in lines:
                file.write(line)
        try:
            return FileIO(os.open(self.path, FLAGS), "r+")
        except OSError as error:
            raise self._failure(error) from error

    def write(self, line: dict[str, Any]) -> None:
        """Add a line. JSON knows no NaN and no infinity: null. What the disk does not take waits for the next `flush`."""
        try:
            text = ENCODE(line)
        except ValueError:
            text = ENCODE({name: value if math.isfinite(value) else None for name, value in line.items()})
        self._waiting += text.encode() + b"\n"
        if (now := monotonic()) >= self._due:
            self._due = now + WAIT
            with suppress(OSError, FileError):
                self._put()
        if self.also:
            self.also.write(line)
        listener.tell(line)

    def _put(self) -> None:
        file = self.begin()._file
        while file and self._waiting:
            self._waiting = self._waiting[file.write(self._waiting) :]

    def flush(self) -> None:
        """Have all lines on the disk: to be called before a checkpoint is written, which must not know more than they do."""
        if not self._file and not self._waiting:
            return
        if self.also:
            self.also.flush()
        try:
            self._put()
            self._find()
            os.fsync(self.begin()._file.fileno())  # type: ignore[union-attr]
        except OSError as error:
            raise self._failure(error) from error

    def _find(self) -> None:
        """Where its name is no more, or another file's, it is made again of what was written."""
        assert self._file
        with suppress(FileNotFoundError):
            if os.path.samestat(os.lstat(self.path), os.fstat(self._file.fileno())):
                return
            move_aside(self.path)
        made = self._made(raw for raw, _ in lines_in(self._all()))
        self._file.close()
        self._file = made
        self.tell(f"{self.path} was gone: it is made again")

    def copied(self, path: Path) -> "Metrics":
        """Another file with all lines, for where this one takes no more."""
        made = Metrics(path)
        made._file = made._made(raw for raw, _ in lines_in(self._all()))
        return made

    def _all(self) -> Iterator[bytes]:
        """All that was written of the run, also what the disk did not take."""
        last = b""
        if self._file:
            with os.fdopen(os.dup(self._file.fileno()), "rb") as file:
                file.seek(0)
                for last in pieces_of(file):
                    if last.endswith(b"\n"):
                        yield last
        else:
            yield from self._kept()
        yield from ((b"" if last.endswith(b"\n") else last) + self._waiting).splitlines(keepends=True)

    def lines(self) -> Iterator[dict[str, Any]]:
        """All lines of the run, those of earlier processes too; one that is damaged is passed over."""
        with suppress(FileError):  # the next save tells it
            self.flush()
        return (line for _, line in lines_in(self._all()))

    def read(self) -> list[dict[str, Any]]:
        return list(self.lines())

    def close(self) -> None:
        if self.also:
            self.also.close()
        if self._file and not self._file.closed:
            try:
                self.flush()
            finally:
                with suppress(OSError):  # of a disk that is full: it was told
                    self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _failure(self, error: OSError) -> FileError:
        return FileError(f"{self.path}: cannot be written: {error.strerror}")


def lines_of(
    path: Path, tell: Callable[[str], None] = lambda line: None
) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The lines of a file that are JSON objects with a step, as they lie there and as they read; what is no file has none. It is
    told if others are among them; the last one may be half written."""
    read, first, damaged, torn = 0, 0, 0, False
    try:
        if path.is_file():  # asked before it is opened: a pipe would wait for a writer
            with path.open("rb") as file:
                for read, piece in enumerate(pieces_of(file), 1):
                    line = line_in(piece)
                    if line is not None:
                        yield piece, line
                    else:
                        first, damaged, torn = first or read, damaged + 1, not piece.endswith(b"\n")
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from error
    if damaged > (torn and first == read):
        others = f", and {damaged - 1:,} others," if damaged > 1 else ""
        tell(f"{path}: line {first:,}{others} is no figure of a step, and passed over")


def pieces_of(file: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: file.readline(LONGEST), b"")


def lines_in(pieces: Iterable[bytes]) -> Iterator[tuple[bytes, dict[str, Any]]]:
    return ((raw, line) for raw in pieces if (line := line_in(raw)) is not None)


def line_in(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw.decode())
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and type(line.get("step")) is int else None
