"""A run that is replaced: put aside as a whole until the new one has saved something, and put back if that never comes.

What was put aside is known by its name, which has the numbers that the system gave its folder and the run's: a folder that
came from somewhere else, or was copied, has others. It is left as it is.
"""

import os
import re
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

from llamatrain.checkpoints.filenames import run_files

# A run that was replaced, as a whole; or one that is on its way to there or back, whose other files lie where they were.
REPLACED, REPLACING = ".replaced-", ".replacing-"
MARKED = re.compile(r"\.replac(?:ed|ing)-(\d+-\d+)")


def folder_mark(folder: Path, aside: Path) -> str:
    return f"{folder.stat().st_ino}-{aside.lstat().st_ino}"


def find_replaced(folder: Path) -> list[Path]:
    """Those that were made here."""
    with os.scandir(folder) as entries:
        named = [
            (folder / entry.name, MARKED.fullmatch(entry.name))
            for entry in entries
            if entry.is_dir(follow_symlinks=False)
        ]
    return [aside for aside, match in named if match and match[1] == folder_mark(folder, aside)]


def create_replacing(folder: Path) -> Path:
    """A place for a run that is to be put aside."""
    bare = Path(mkdtemp(prefix=REPLACING, dir=folder))
    return bare.rename(folder / f"{REPLACING}{folder_mark(folder, bare)}")


def remove_empty(folder: Path) -> None:
    """Places that were made, and the process killed before there was anything in them."""
    for path in folder.glob(f"{REPLACING}*"):
        if not path.is_symlink():
            with suppress(OSError):  # there is something in it
                path.rmdir()


def with_prefix(aside: Path, prefix: str) -> Path:
    return aside.with_name(prefix + aside.name.partition("-")[2])


def restore(aside: Path) -> None:
    """Where nothing has taken the place; a kill in between leaves it on its way."""
    folder = aside.parent
    if aside.name.startswith(REPLACED) and run_files(aside):
        aside = aside.rename(with_prefix(aside, REPLACING))
    for file in run_files(aside):
        if not os.path.lexists(folder / file.name):
            file.rename(folder / file.name)
    with suppress(OSError):  # what else is in it is not a run's
        aside.rmdir()


def remove(aside: Path) -> None:
    for file in run_files(aside):
        file.unlink()
    with suppress(OSError):
        aside.rmdir()
