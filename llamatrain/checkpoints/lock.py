"""A lock on a run's folder that ends with its process."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from llamatrain.errors import FileError, wrap_os_errors
from llamatrain.platform.locks import descriptor_paths, open_folder_locked

NAME = ".lock"  # a lock file, if the folder itself cannot be locked


@dataclass(frozen=True)
class FolderLock:
    """A locked folder."""

    release: Callable[[], None]
    descriptor: int | None = None  # of the open folder

    def current_path(self, folder: Path) -> Path | None:
        """Return the folder's path now, even if it was moved; None if it is gone or unknown."""
        if self.descriptor is None:
            return folder if folder.is_dir() else None
        status = os.fstat(self.descriptor)
        for candidate in (folder, *descriptor_paths(self.descriptor)):
            with suppress(OSError):
                if os.path.samestat(candidate.stat(), status):
                    return candidate
        return None


def lock_folder(folder: Path) -> FolderLock:
    """Lock a folder until the lock is released."""
    with wrap_os_errors(folder, "cannot be used for a run"):
        try:
            descriptor = open_folder_locked(folder)
        except BlockingIOError as error:
            raise in_use_error(folder) from error
        if descriptor is None:  # folders have no locks here
            return _lock_file(folder)
        return FolderLock(partial(os.close, descriptor), descriptor)


def _lock_file(folder: Path) -> FolderLock:
    from filelock import FileLock, Timeout

    lock = FileLock(folder / NAME, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise in_use_error(folder) from error

    def release() -> None:
        lock.release()
        with suppress(OSError):
            (folder / NAME).unlink(missing_ok=True)

    return FolderLock(release)


def in_use_error(folder: Path) -> FileError:
    """Return the error for a folder that another run uses."""
    return FileError(
        f"{folder}: another run is using this folder; choose another one, or wait until it ends",
        code="folder-in-use",
    )
