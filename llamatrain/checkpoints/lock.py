"""One run at a time writes in a folder, and what says so ends with its process, however that ends."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from llamatrain.checkpoints.filenames import telling
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
    place: int | None = None  # the folder itself, open

    def whereabouts(self, folder: Path) -> Path | None:
        """Where it lies by now, under its old name or another; None: nowhere, or nobody knows."""
        if self.place is None:
            return folder if folder.is_dir() else None
        mine = os.fstat(self.place)
        for each in (folder, *names_of(self.place)):
            with suppress(OSError):
                if os.path.samestat(each.stat(), mine):
                    return each
        return None


def names_of(place: int) -> list[Path]:
    """What the system calls an open folder."""
    with suppress(OSError):
        return [Path(f"/proc/self/fd/{place}").readlink()]
    with suppress(OSError, AttributeError):
        return [Path(os.fsdecode(fcntl.fcntl(place, fcntl.F_GETPATH, bytes(LONGEST_PATH)).rstrip(b"\0")))]  # type: ignore[attr-defined]
    return []


def locked(folder: Path) -> FolderLock:
    """Hold a folder until it is released."""
    with telling(folder, "cannot be used for a run"):
        return _by_itself(folder) if fcntl else _by_a_file(folder)


def _by_itself(folder: Path) -> FolderLock:
    """The open folder is the lock, so that it leaves nothing."""
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(place)
        raise refusal(folder) from error
    except OSError:
        pass  # a file system without locks
    return FolderLock(partial(os.close, place), place)


def _by_a_file(folder: Path) -> FolderLock:
    from filelock import FileLock, Timeout

    lock = FileLock(folder / NAME, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise refusal(folder) from error

    def release() -> None:
        lock.release()
        with suppress(OSError):
            (folder / NAME).unlink(missing_ok=True)

    return FolderLock(release)


def refusal(folder: Path) -> FileError:
    return FileError(f"{folder}: another run is using this folder")
