"""A run that is replaced: put aside as a whole until the new one has saved something, and put back if that never comes.

What was put aside is known by its name, which has the numbers that the system gave its folder and the run's: a folder that
came from somewhere else, or was copied, has others. It is left as it is.
"""

import os
import re
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

from llamatrain.checkpoints.filenames import files_of

# A run that was replaced, as a whole; or one that is on its way to there or back, whose other files lie where they were.
ASIDE, ON_ITS_WAY = ".replaced-", ".replacing-"
MARKED = re.compile(r"\.replac(?:ed|ing)-(\d+-\d+)")


def mark(folder: Path, aside: Path) -> str:
    return f"{folder.stat().st_ino}-{aside.lstat().st_ino}"


def of(folder: Path) -> list[Path]:
    """Those that were made here."""
    with os.scandir(folder) as found:
        named = [
            (folder / each.name, MARKED.fullmatch(each.name))
            for each in found
            if each.is_dir(follow_symlinks=False)
        ]
    return [aside for aside, match in named if match and match[1] == mark(folder, aside)]


def made(folder: Path) -> Path:
    """A place for a run that is to be put aside."""
    bare = Path(mkdtemp(prefix=ON_ITS_WAY, dir=folder))
    return bare.rename(folder / f"{ON_ITS_WAY}{mark(folder, bare)}")


def sweep(folder: Path) -> None:
    """Places that were made, and the process killed before there was anything in them."""
    for each in folder.glob(f"{ON_ITS_WAY}*"):
        if not each.is_symlink():
            with suppress(OSError):  # there is something in it
                each.rmdir()


def renamed(aside: Path, start: str) -> Path:
    return aside.with_name(start + aside.name.partition("-")[2])


def put_back(aside: Path) -> None:
    """Where nothing has taken the place; a kill in between leaves it on its way."""
    folder = aside.parent
    if aside.name.startswith(ASIDE) and files_of(aside):
        aside = aside.rename(renamed(aside, ON_ITS_WAY))
    for file in files_of(aside):
        if not os.path.lexists(folder / file.name):
            file.rename(folder / file.name)
    with suppress(OSError):  # what else is in it is not a run's
        aside.rmdir()


def remove(aside: Path) -> None:
    for file in files_of(aside):
        file.unlink()
    with suppress(OSError):
        aside.rmdir()
