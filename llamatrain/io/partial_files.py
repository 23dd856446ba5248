"""Files that are being written beside their places. Who writes one holds it: what nobody holds is of a process that is gone."""

import os
import re
import stat
import zlib
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from llamatrain.platform.temp_files import goes_with_program, remove_free, removed

LONGEST = 50  # characters of the place's name; of a longer one a sum stands for the rest


def begun(place: Path) -> tuple[Path, BinaryIO]:
    """A new one, held; those that were left for the same place go."""
    remove_left(place)
    while True:
        path = place.with_name(f"{stem(place)}{os.urandom(4).hex()}.tmp")
        file = path.open("xb")
        try:
            with suppress(FileNotFoundError):  # another took it for left, before it was held
                if goes_with_program(path).exists():
                    return path, file
        except BaseException:
            removed(path)
            raise
        removed(path)
        file.close()


def stem(place: Path) -> str:
    name = place.name
    return (
        f".{name}."
        if len(name) <= LONGEST
        else f".{name[: LONGEST - 9]}-{zlib.crc32(os.fsencode(name)):08x}."
    )


def remove_left(place: Path) -> None:
    name = re.compile(re.escape(stem(place)) + r"[0-9a-f]{8}\.tmp")
    with suppress(OSError):  # of a folder that cannot be looked into, or files of others
        for path in [Path(each) for each in os.scandir(place.parent) if name.fullmatch(each.name)]:
            if stat.S_ISREG(path.lstat().st_mode):
                remove_free(path)
