"""Locks on files and folders that end with their process.

Unix locks open files and folders. Windows cannot open a folder, and protects open files from removal by itself;
there the functions lock nothing, and others go by ages.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

if sys.platform == "win32":
    HAS_LOCKS = False

    def _lock_descriptor(descriptor: int, shared: bool = False, wait: bool = False) -> None:
        raise OSError("no locks on this system")

else:
    import fcntl

    HAS_LOCKS = True

    def _lock_descriptor(descriptor: int, shared: bool = False, wait: bool = False) -> None:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)


FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
NO_LINKS, FOLDER = getattr(os, "O_NOFOLLOW", 0), getattr(os, "O_DIRECTORY", 0)
LONGEST_PATH = 1024  # bytes that macOS writes a path to


def open_locked(path: Path) -> int | None:
    """Open a file or folder and wait for its lock; return the descriptor, or None where there are no locks."""
    if not HAS_LOCKS:
        return None
    descriptor = os.open(path, FLAGS)
    with suppress(OSError):  # a file system without locks
        _lock_descriptor(descriptor, wait=True)
    return descriptor


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Lock a file or folder until the block or the process ends."""
    descriptor = open_locked(path)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Yield True if nobody had locked the path; then it is locked during the block."""
    if not HAS_LOCKS:
        yield True
        return
    descriptor = os.open(path, FLAGS | NO_LINKS)
    try:
        _lock_descriptor(descriptor)
        is_free = True
    except OSError:  # it is locked, or the file system has no locks
        is_free = False
    try:
        yield is_free
    finally:
        os.close(descriptor)


def lock_shared(descriptor: int) -> None:
    """Lock an open file together with other readers until it is closed, so that it is not removed."""
    if HAS_LOCKS:
        with suppress(OSError):
            _lock_descriptor(descriptor, shared=True)


def open_folder_locked(folder: Path) -> int | None:
    """Open and lock a folder at once. Raise BlockingIOError if it is locked; return None without locks."""
    if not HAS_LOCKS:
        return None
    descriptor = os.open(folder, FLAGS | FOLDER)
    try:
        _lock_descriptor(descriptor)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        pass  # the file system has no locks
    return descriptor


def descriptor_paths(descriptor: int) -> list[Path]:
    """Return the paths that the system gives for an open folder, which may have been moved."""
    with suppress(OSError):
        if sys.platform == "darwin":
            raw = fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(LONGEST_PATH))
            return [Path(os.fsdecode(raw.rstrip(b"\0")))]
        else:
            return [Path(f"/proc/self/fd/{descriptor}").readlink()]
    return []
