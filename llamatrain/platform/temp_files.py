"""Temporary files that are deleted when the program ends. What a SIGKILL leaves, the next run removes."""

import atexit
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

NEW_PREFIX = ".new-"  # prefix of unfinished files, and of folders being removed
TEMP_PREFIX = ".llamatrain-passing-"  # prefix of our names among the system's temporary files
DAY = 24 * 60 * 60  # seconds without a write after which, without locks, a file is a leftover

# the owning process (a fork does not own them) and the lock's descriptor
_paths_to_delete: dict[Path, tuple[int, int | None]] = {}


def delete_at_exit(path: Path) -> Path:
    """Delete a path at exit, and lock it so that no other run takes it for a leftover."""
    register_for_removal(path)
    owner, lock = _paths_to_delete[path]
    if lock is None:  # a second lock would wait for the first
        _paths_to_delete[path] = owner, _lock(path)
    return path


def register_for_removal(path: Path) -> None:
    """Delete a path at exit. Called before the path is created, so that a signal at any moment leaves nothing."""
    _paths_to_delete.setdefault(path, (os.getpid(), None))


def remove_path(path: Path) -> None:
    """Remove a file or a folder with its contents, if it exists."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)  # rmtree would open a pipe and block
        else:
            path.unlink()
    _, lock = _paths_to_delete.pop(path, (0, None))
    if lock is not None:
        os.close(lock)


@atexit.register
def remove_all() -> None:
    """Remove all temporary paths of this process, also when it exits at once."""
    for path, (owner, _) in list(_paths_to_delete.items()):
        if owner == os.getpid():
            remove_path(path)


def create_temp_folder() -> Path:
    """Create a folder among the system's temporary files, deleted at exit."""
    return _create(lambda: tempfile.mkdtemp(prefix=TEMP_PREFIX))


def create_temp_file() -> Path:
    """Create a file among the system's temporary files, deleted at exit."""
    return _create(lambda: _close(*tempfile.mkstemp(prefix=TEMP_PREFIX)))


def _create(make: Callable[[], str]) -> Path:
    remove_leftovers(Path(tempfile.gettempdir()), TEMP_PREFIX)
    while True:
        path = Path(make())
        with suppress(FileNotFoundError):  # another run removed it before it was locked
            if delete_at_exit(path).exists():
                return path
        remove_path(path)


def _close(descriptor: int, name: str) -> str:
    os.close(descriptor)
    return name


# ---- what others left --------------------------------------------


def remove_leftovers(folder: Path, prefix: str) -> None:
    """Remove paths with a prefix that killed processes left."""
    with suppress(OSError):
        for leftover in folder.glob(f"{prefix}*"):
            with suppress(OSError):  # another process removes it now
                age = time.time() - max(path.lstat().st_mtime for path in (leftover, *leftover.glob("*")))
                if age > DAY:
                    remove_path(leftover)
                remove_if_unlocked(leftover)


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Lock a file or folder until the block or the process ends. Systems without locks use ages instead."""
    lock = _lock(path)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _lock(path: Path) -> int | None:
    if not fcntl:
        return None
    lock = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def remove_if_unlocked(path: Path) -> None:
    """Remove a path that nobody has locked. A creator that loses its path before locking it tries again."""
    if not fcntl:
        return
    with try_lock(path) as is_free:
        if is_free:
            remove_path(path)


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Yield True if nobody had locked the path; then it is locked during the block."""
    if not fcntl:
        yield True
        return
    lock = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield _acquire(lock)
    finally:
        os.close(lock)


def _acquire(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # it is locked, or the file system has no locks
        return False
    return True


def lock_shared(file: int) -> None:
    """Lock an open file together with other readers until it is closed, so that it is not removed."""
    if fcntl:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
