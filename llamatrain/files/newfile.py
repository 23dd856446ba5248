"""A file takes its name when it is whole, and not before: what stood there stays until then."""

import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from llamatrain.errors import FileError
from llamatrain.files.unfinished import begun
from llamatrain.machine.temporary import removed


class NewFile:
    """A file being written beside its place; leaving the `with` block without an error moves it there."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._place = Path(os.path.realpath(path))  # a link stays, and what it points to is replaced
        if self._place.exists() and not self._place.is_file():
            raise FileError(f"{path}: this is a folder or a device, no place for a file")
        try:
            self._temporary, self._file = begun(self._place)
        except OSError as error:
            raise self._failure(error) from error

    def write(self, data: np.ndarray | bytes) -> int:
        """How many bytes were written: all of them."""
        try:
            return self._file.write(np.ascontiguousarray(data).data if isinstance(data, np.ndarray) else data)
        except OSError as error:
            raise self._failure(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._keep()
        except OSError as failure:
            raise self._failure(failure) from failure
        finally:
            with suppress(OSError):  # of a disk that is full: closing writes what is left in the buffer
                self._file.close()
            removed(self._temporary)  # there is none after a move

    def _keep(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._temporary.replace(self._place)
        if os.name == "posix":
            folder = os.open(self._place.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _failure(self, error: OSError) -> FileError:
        return FileError(f"{self.path}: cannot be written: {error.strerror}")
