"""Files that are being written beside their places. Who writes one holds it: what nobody holds is of a process that is gone."""

import os
import re
import stat
import zlib
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from llamatrain.machine.temporary import goes_with_program, removed

try:
    import fcntl
except ImportError:  # as on Windows, where a file that is open cannot be removed
    fcntl = None  # type: ignore[assignment]

NOW = fcntl.LOCK_NB if fcntl else 0
LONGEST = 50  # characters of the place's name; of a longer one a sum stands for the rest


def begun(place: Path) -> tuple[Path, BinaryIO]:
    """A new one, held; those that were left for the same place go."""
    remove_left(place)
    while True:
        path = goes_with_program(place.with_name(f"{stem(place)}{os.urandom(4).hex()}.tmp"))
        try:
            file = path.open("xb")
        except BaseException:  # an interrupt, when it is there already
            removed(path)
            raise
        locked(file)
        if path.exists():  # else another took it for left, before it was held
            return path, file
        file.close()


def stem(place: Path) -> str:
    name = place.name
    return f".{name}." if len(name) <= LONGEST else f".{name[: LONGEST - 9]}-{zlib.crc32(os.fsencode(name)):08x}."


def remove_left(place: Path) -> None:
    name = re.compile(re.escape(stem(place)) + r"[0-9a-f]{8}\.tmp")
    with suppress(OSError):  # of a folder that cannot be looked into, or files of others
        for path in [Path(each) for each in os.scandir(place.parent) if name.fullmatch(each.name)]:
            if stat.S_ISREG(path.lstat().st_mode):
                with path.open("r+b") as file:
                    if locked(file, NOW):
                        path.unlink()


def locked(file: BinaryIO, wait: int = 0) -> bool:
    """Whether it is ours from now until it is closed; not so on a file system without locks."""
    with suppress(OSError):
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | wait)
        return True
    return False
