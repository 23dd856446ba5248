"""metrics.jsonl: a JSON object a line for each step and each validation."""

import json
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Literal, Self

from llamatrain.errors import FileError
from llamatrain.files.newfile import NewFile

WAIT = 0.2  # seconds that lines may lie in the buffer while steps follow fast
LONGEST = 4096  # bytes of a line that is read; ours have some 150
ENCODE = json.JSONEncoder(allow_nan=False, default=lambda number: number.item()).encode  # numbers of numpy are welcome


class Metrics:
    """The file of a run, open for more lines. What was written lies in the file after 0.2 s, or after `flush`."""

    def __init__(self, path: str | Path, mode: Literal["wb", "ab"]) -> None:
        self.path = Path(path)
        self._due = 0.0
        try:
            self._file = self.path.open(mode)
        except OSError as error:
            raise self._failure(error) from error

    @classmethod
    def fresh(cls, path: str | Path) -> Self:
        """An empty file; what stood there is gone."""
        return cls(path, "wb")

    @classmethod
    def resumed(cls, path: str | Path, step: int) -> Self:
        """The file up to a step: later lines go, and so does whatever a killed process left half written."""
        if os.path.lexists(path):
            with NewFile(path) as kept:
                for raw, line in lines_of(Path(path)):
                    if line["step"] <= step:
                        kept.write(raw.strip() + b"\n")
        return cls(path, "ab")

    def write(self, line: dict[str, Any]) -> None:
        """Add a line. JSON knows no NaN and no infinity: null."""
        try:
            text = ENCODE(line)
        except ValueError:
            text = ENCODE({name: value if math.isfinite(value) else None for name, value in line.items()})
        try:
            self._file.write(text.encode() + b"\n")
            if (now := monotonic()) >= self._due:
                self._file.flush()
                self._due = now + WAIT
        except OSError as error:
            raise self._failure(error) from error

    def flush(self) -> None:
        """Have all lines on the disk: to be called before a checkpoint is written, which must not know more than they do."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._failure(error) from error

    def lines(self) -> Iterator[dict[str, Any]]:
        """All lines of the run, those of earlier processes too; one that is damaged is passed over."""
        self.flush()
        return (line for _, line in lines_of(self.path))

    def read(self) -> list[dict[str, Any]]:
        return list(self.lines())

    def close(self) -> None:
        if not self._file.closed:
            try:
                self.flush()
            finally:
                with suppress(OSError):  # of a disk that is full: it was told
                    self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _failure(self, error: OSError) -> FileError:
        return FileError(f"{self.path}: cannot be written: {error.strerror}")


def lines_of(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The lines of a file that are JSON objects with a step, as they lie there and as they read."""
    try:
        with path.open("rb") as file:
            for raw in iter(lambda: file.readline(LONGEST), b""):
                with suppress(ValueError, RecursionError):
                    line = json.loads(raw)
                    if isinstance(line, dict) and type(line.get("step")) is int:
                        yield raw, line
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from error
