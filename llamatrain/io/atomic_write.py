"""Atomic writing: a file gets its name when it is complete. Until then, the file of that name stays."""

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from llamatrain.errors import FileError
from llamatrain.io.partial_files import create_partial
from llamatrain.platform.files import CAN_MOVE_OPEN_FILES, replace_file
from llamatrain.platform.temp_files import remove_path

CHUNK_BYTES = 1 << 20  # bytes that are copied at a time
DEVICES = "/dev"
ASIDE_SUFFIX = ".passed-over"  # suffix of a file that is moved aside


class AtomicFile:
    """A file under a temporary name, moved to its path when the `with` block ends without an error.

    A symbolic link at the path is replaced; its target stays as it is. The new file grants no rights that the
    file it replaces did not grant. `check` is called with the complete file before the move and may raise
    FileError.
    """

    def __init__(self, path: str | Path, check: Callable[[Path], object] | None = None) -> None:
        self.path, self._check = Path(path), check
        try:
            is_special = os.path.lexists(path) and stat.S_IFMT(os.lstat(path).st_mode) not in (
                stat.S_IFREG,
                stat.S_IFLNK,
            )
            if is_special or os.path.realpath(self.path.parent) == DEVICES:  # links there are devices, too
                raise FileError(
                    f"{path}: this is a folder, a device or a pipe; choose another path for the file",
                    code="not-a-file",
                )
            self._temporary, self._file = create_partial(self.path)
            restrict_mode(self._temporary, self.path)
        except OSError as error:
            raise self._write_error(error) from error

    def write(self, data: np.ndarray | bytes) -> int:
        """Write all of `data` and return the number of bytes."""
        try:
            return self._file.write(np.ascontiguousarray(data).data if isinstance(data, np.ndarray) else data)
        except OSError as error:
            raise self._write_error(error) from error

    def overwrite(self, at: int, data: bytes) -> None:
        """Overwrite the bytes at an earlier offset, then continue at the end."""
        try:
            self._file.seek(at)
            self._file.write(data)
            self._file.seek(0, os.SEEK_END)
        except OSError as error:
            raise self._write_error(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._publish()
        except OSError as failure:
            raise self._write_error(failure) from failure
        finally:
            with suppress(OSError):  # full disk: closing writes the rest of the buffer
                self._file.close()
            remove_path(self._temporary)  # after a move, there is nothing to remove

    def _publish(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._check:
            self._run_check()
        if not CAN_MOVE_OPEN_FILES:  # elsewhere it stays locked until it has its name
            self._file.close()
        replace_file(self._temporary, self.path)

    def _run_check(self) -> None:
        assert self._check
        try:
            self._check(self._temporary)
        except FileError as error:
            message = str(error).removeprefix(f"{self._temporary}: ")
            raise FileError(
                f"{self.path}: not written, because it could not be read back: {message}", code=error.code
            ) from error

    def _write_error(self, error: OSError) -> FileError:
        return FileError(f"{self.path}: cannot be written: {error.strerror}", code="write-failed")


def restrict_mode(new: Path, old: Path) -> None:
    """Remove permissions from `new` that group and others do not have for `old`."""
    with suppress(FileNotFoundError):
        status = old.lstat()
        if stat.S_ISREG(status.st_mode):
            before = stat.S_IMODE(new.stat().st_mode)
            if (mode := before & (status.st_mode | stat.S_IRWXU)) != before:
                new.chmod(mode)


def move_aside(file: Path) -> None:
    """Rename a file to the first free name `<name>.passed-over[-N]`."""
    for attempt in count():
        target = file.with_name(f"{file.name}{ASIDE_SUFFIX}{f'-{attempt}' if attempt else ''}")
        if not os.path.lexists(target):
            file.rename(target)
            return


def copy_file(source: Path, target: Path) -> None:
    """Copy a file; the copy gets its name when it is complete."""
    try:
        with source.open("rb") as file, AtomicFile(target) as copy:
            while chunk := file.read(CHUNK_BYTES):
                copy.write(chunk)
    except OSError as error:
        raise FileError(f"{source}: cannot be copied: {error.strerror}", code="copy-failed") from error


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source`, or a copy where the file system has no hard links."""
    hidden = target.with_name(f".{target.name}.{os.urandom(4).hex()}.tmp")
    try:
        restrict_mode(source, target)
        hidden.hardlink_to(source)
        hidden.replace(target)
    except OSError:  # the file system has no hard links
        copy_file(source, target)
    finally:  # if both are already the same file, replace() leaves it
        with suppress(OSError):
            hidden.unlink(missing_ok=True)
