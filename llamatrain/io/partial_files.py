"""Unfinished files next to their target.

The writer locks its file, so an unlocked one belongs to a dead process.
"""

import os
import re
import stat
import zlib
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from llamatrain.platform.temp_files import (
    delete_at_exit,
    register_for_removal,
    remove_if_unlocked,
    remove_path,
)

MAX_STEM = 50  # the most characters of the target's name; a checksum replaces the rest


def create_partial(target: Path) -> tuple[Path, BinaryIO]:
    """Create and lock a new temporary file next to `target`, and remove leftovers for the same target."""
    remove_partials(target)
    while True:
        path = target.with_name(f"{partial_prefix(target)}{os.urandom(4).hex()}.tmp")
        register_for_removal(path)
        try:
            file = path.open("xb")
            with suppress(FileNotFoundError):  # another process removed it before it was locked
                if delete_at_exit(path).exists():
                    return path, file
        except BaseException:
            remove_path(path)
            raise
        remove_path(path)
        file.close()


def partial_prefix(target: Path) -> str:
    """Return the prefix of temporary names for `target`; a checksum replaces the end of a long name."""
    name = target.name
    return (
        f".{name}."
        if len(name) <= MAX_STEM
        else f".{name[: MAX_STEM - 9]}-{zlib.crc32(os.fsencode(name)):08x}."
    )


def remove_partials(target: Path) -> None:
    """Remove unlocked temporary files for `target`."""
    name = re.compile(re.escape(partial_prefix(target)) + r"[0-9a-f]{8}\.tmp")
    with suppress(OSError):  # the folder is not readable, or a file belongs to another user
        for path in [Path(entry) for entry in os.scandir(target.parent) if name.fullmatch(entry.name)]:
            if stat.S_ISREG(path.lstat().st_mode):
                remove_if_unlocked(path)
