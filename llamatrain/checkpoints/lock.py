"""A lock on a run's folder that ends with its process."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from llamatrain.errors import FileError, wrap_os_errors

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"  # a lock file, if the folder itself cannot be locked
LONGEST_PATH = 1024


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


def descriptor_paths(descriptor: int) -> list[Path]:
    """Return the paths that the system gives for an open folder."""
    with suppress(OSError):
        return [Path(f"/proc/self/fd/{descriptor}").readlink()]
    with suppress(OSError, AttributeError):
        raw = fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(LONGEST_PATH))  # type: ignore[attr-defined]
        return [Path(os.fsdecode(raw.rstrip(b"\0")))]
    return []


def lock_folder(folder: Path) -> FolderLock:
    """Lock a folder until the lock is released."""
    with wrap_os_errors(folder, "cannot be used for a run"):
        return _lock_descriptor(folder) if fcntl else _lock_file(folder)


def _lock_descriptor(folder: Path) -> FolderLock:
    """Lock the open folder itself, so that no file is left."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise in_use_error(folder) from error
    except OSError:
        pass  # the file system has no locks
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
