"""Files that go with the program, however it ends; what a SIGKILL leaves, the next run removes."""

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

NEW_PREFIX = ".new-"  # begins the name of what is not there yet, or not any more
TEMP_PREFIX = ".llamatrain-passing-"  # begins the names among the system's temporary files
DAY = (
    24 * 60 * 60
)  # seconds without a write, after which a run that was making something is gone, where nothing can be held

_paths_to_delete: dict[
    Path, tuple[int, int | None]
] = {}  # the process that they belong to (a fork leaves them to it), and their lock


def delete_at_exit(path: Path) -> Path:
    """It is held for as long as it is there, so that no other run takes it for what was left behind."""
    if path not in _paths_to_delete:  # a second lock of the same would wait for the first
        _paths_to_delete[path] = os.getpid(), _lock(path)
    return path


def remove_path(path: Path) -> None:
    """A file, or a folder with all that is in it, if it is there."""
    _, lock = _paths_to_delete.pop(path, (0, None))
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)  # which would open a pipe, and wait
        else:
            path.unlink()
    if lock is not None:
        os.close(lock)


@atexit.register
def remove_all() -> None:
    """Also for a process that is ended at once, where nothing else is done any more."""
    for path, (owner, _) in list(_paths_to_delete.items()):
        if owner == os.getpid():
            remove_path(path)


def create_temp_folder() -> Path:
    """One among the system's temporary files."""
    return _create(lambda: tempfile.mkdtemp(prefix=TEMP_PREFIX))


def create_temp_file() -> Path:
    return _create(lambda: _close(*tempfile.mkstemp(prefix=TEMP_PREFIX)))


def _create(make: Callable[[], str]) -> Path:
    remove_leftovers(Path(tempfile.gettempdir()), TEMP_PREFIX)
    while True:
        path = Path(make())
        with suppress(FileNotFoundError):  # another run that sweeps saw it before it was held
            if delete_at_exit(path).exists():
                return path
        remove_path(path)


def _close(descriptor: int, name: str) -> str:
    os.close(descriptor)
    return name


# ---- what others left --------------------------------------------


def remove_leftovers(folder: Path, prefix: str) -> None:
    """Remove what runs that were killed have left under names that begin so."""
    with suppress(OSError):
        for leftover in folder.glob(f"{prefix}*"):
            with suppress(OSError):  # its own run, or another that sweeps, removes it now
                age = time.time() - max(path.lstat().st_mtime for path in (leftover, *leftover.glob("*")))
                if age > DAY:
                    remove_path(leftover)
                remove_if_unlocked(leftover)


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """An open file or folder is a lock that ends with its process, however that ends; where there are none, its age tells."""
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
    """If nobody holds it; who has just made it, and is about to, sees that it is gone."""
    if not fcntl:
        return
    with try_lock(path) as is_free:
        if is_free:
            remove_path(path)


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Whether nobody holds it; then nobody else does while this is open."""
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
    except OSError:  # it is held, or the file system has no locks
        return False
    return True


def lock_shared(file: int) -> None:
    """An open file is held beside others that read it, until it is closed: it is not removed as long."""
    if fcntl:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
