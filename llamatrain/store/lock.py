"""One run at a time writes in a folder, and what says so ends with its process, however that ends."""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from llamatrain.errors import FileError
from llamatrain.store.names import telling

try:
    import fcntl
except ImportError:  # as on Windows
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"  # of a file, where a folder itself cannot be held


def locked(folder: Path) -> Callable[[], None]:
    """Hold a folder; what is given back lets it go."""
    with telling(folder, "cannot be used for a run"):
        return _by_itself(folder) if fcntl else _by_a_file(folder)


def _by_itself(folder: Path) -> Callable[[], None]:
    """The open folder is the lock, so that it leaves nothing."""
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(place)
        raise refusal(folder) from error
    except OSError:
        pass  # a file system without locks
    return partial(os.close, place)


def _by_a_file(folder: Path) -> Callable[[], None]:
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

    return release


def refusal(folder: Path) -> FileError:
    return FileError(f"{folder}: another run is using this folder")
