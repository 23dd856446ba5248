"""A run that is being replaced is set aside until the new one has saved something, or restored if that never happens.

Its folder's name contains the inode numbers of the run's folder and of itself: a folder that came from
elsewhere, or was copied, has other numbers, and is left as it is.
"""

import os
import re
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

from llamatrain.checkpoints.filenames import run_files

# A run that was set aside completely; or one that is being moved, whose other files are still in the folder.
REPLACED, REPLACING = ".replaced-", ".replacing-"
MARKED = re.compile(r"\.replac(?:ed|ing)-(\d+-\d+)")


def folder_mark(folder: Path, aside: Path) -> str:
    """Return the inode numbers of both folders."""
    return f"{folder.stat().st_ino}-{aside.lstat().st_ino}"


def find_replaced(folder: Path) -> list[Path]:
    """Return the replaced runs that were set aside in this folder."""
    with os.scandir(folder) as entries:
        named = [
            (folder / entry.name, MARKED.fullmatch(entry.name))
            for entry in entries
            if entry.is_dir(follow_symlinks=False)
        ]
    return [aside for aside, match in named if match and match[1] == folder_mark(folder, aside)]


def create_replacing(folder: Path) -> Path:
    """Create the folder for a run that is to be set aside."""
    bare = Path(mkdtemp(prefix=REPLACING, dir=folder))
    return bare.rename(folder / f"{REPLACING}{folder_mark(folder, bare)}")


def remove_empty(folder: Path) -> None:
    """Remove empty folders that a killed process left."""
    for path in folder.glob(f"{REPLACING}*"):
        if not path.is_symlink():
            with suppress(OSError):  # it is not empty
                path.rmdir()


def with_prefix(aside: Path, prefix: str) -> Path:
    """Return the path with another prefix."""
    return aside.with_name(prefix + aside.name.partition("-")[2])


def restore(aside: Path) -> None:
    """Move the files back unless their names are taken; a killed process leaves the rest for the next one."""
    folder = aside.parent
    if aside.name.startswith(REPLACED) and run_files(aside):
        aside = aside.rename(with_prefix(aside, REPLACING))
    for file in run_files(aside):
        if not os.path.lexists(folder / file.name):
            file.rename(folder / file.name)
    with suppress(OSError):  # other files stay
        aside.rmdir()


def remove(aside: Path) -> None:
    """Remove a replaced run."""
    for file in run_files(aside):
        file.unlink()
    with suppress(OSError):
        aside.rmdir()
