"""One run at a time writes in a folder, and what says so ends with its process, however that ends."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from llamatrain.checkpoints.filenames import wrap_os_errors
from llamatrain.errors import FileError

try:
    import fcntl
except ImportError:  # as on Windows
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"  # of a file, where a folder itself cannot be held
LONGEST_PATH = 1024


@dataclass(frozen=True)
class FolderLock:
    """A folder that is held."""

    release: Callable[[], None]
    descriptor: int | None = None  # the folder itself, open

    def current_path(self, folder: Path) -> Path | None:
        """Where it lies by now, under its old name or another; None: nowhere, or nobody knows."""
        if self.descriptor is None:
            return folder if folder.is_dir() else None
        status = os.fstat(self.descriptor)
        for each in (folder, *descriptor_paths(self.descriptor)):
            with suppress(OSError):
                if os.path.samestat(each.stat(), status):
                    return each
        return None


def descriptor_paths(descriptor: int) -> list[Path]:
    """What the system calls an open folder."""
    with suppress(OSError):
        return [Path(f"/proc/self/fd/{descriptor}").readlink()]
    with suppress(OSError, AttributeError):
        raw = fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(LONGEST_PATH))  # type: ignore[attr-defined]
        return [Path(os.fsdecode(raw.rstrip(b"\0")))]
    return []


def lock_folder(folder: Path) -> FolderLock:
    """Hold a folder until it is released."""
    with wrap_os_errors(folder, "cannot be used for a run"):
        return _lock_descriptor(folder) if fcntl else _lock_file(folder)


def _lock_descriptor(folder: Path) -> FolderLock:
    """The open folder is the lock, so that it leaves nothing."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise in_use_error(folder) from error
    except OSError:
        pass  # a file system without locks
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
    return FileError(f"{folder}: another run is using this folder")
