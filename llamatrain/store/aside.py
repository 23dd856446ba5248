"""A run that is replaced: put aside as a whole until the new one has saved something, and put back if that never comes."""

from contextlib import suppress
from pathlib import Path

from llamatrain.store.names import files_of

# A run that was replaced, as a whole; or one that is on its way to there or back, whose other files lie where they were.
ASIDE, ON_ITS_WAY = ".replaced-", ".replacing-"


def asides(folder: Path) -> list[Path]:
    return [
        each for each in folder.iterdir() if each.name.startswith((ASIDE, ON_ITS_WAY)) and not each.is_symlink() and each.is_dir()
    ]


def renamed(aside: Path, start: str) -> Path:
    return aside.with_name(start + aside.name.partition("-")[2])


def put_back(aside: Path) -> None:
    """In the place of what a later run has left; a kill in between leaves it on its way."""
    folder = aside.parent
    if aside.name.startswith(ASIDE) and files_of(aside):
        for file in files_of(folder):
            file.unlink()
        aside = aside.rename(renamed(aside, ON_ITS_WAY))
    for file in files_of(aside):
        file.rename(folder / file.name)
    with suppress(OSError):  # what else is in it is not a run's
        aside.rmdir()


def remove(aside: Path) -> None:
    for file in files_of(aside):
        file.unlink()
    with suppress(OSError):
        aside.rmdir()
