"""Temporary files that are deleted when the program ends. What a SIGKILL leaves, the next run removes."""

import atexit
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from llamatrain.platform import locks

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
        _paths_to_delete[path] = owner, locks.open_locked(path)
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
                elif locks.HAS_LOCKS:
                    remove_if_unlocked(leftover)


def remove_if_unlocked(path: Path) -> None:
    """Remove a path that nobody has locked. A creator that loses its path before locking it tries again.

    Where there are no locks, a file that somebody has opened stays, because the system keeps it.
    """
    with locks.try_lock(path) as is_free:
        if is_free:
            remove_path(path)
