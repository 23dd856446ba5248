"""Files that go with the program, however it ends; after a SIGKILL alone they stay."""

import atexit
import os
import shutil
from contextlib import suppress
from pathlib import Path

_going: dict[Path, int] = {}  # and the process that they belong to: a fork leaves them to it


def goes_with_program(path: Path) -> Path:
    _going[path] = os.getpid()
    return path


def removed(path: Path) -> None:
    """A file, or a folder with all that is in it, if it is there."""
    _going.pop(path, None)
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink()


@atexit.register
def remove_all() -> None:
    """Also for a process that is ended at once, where nothing else is done any more."""
    for path, owner in list(_going.items()):
        if owner == os.getpid():
            removed(path)
