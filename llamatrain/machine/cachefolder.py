"""Where things are kept that could be made again, such as compiled kernels and tokens."""

import os
import tempfile
from functools import cache
from pathlib import Path

from platformdirs import user_cache_path

from llamatrain.machine.temporary import goes_with_program

SWITCH = "LLAMATRAIN_CACHE"
NAME = "llamatrain"


def wanted(name: str) -> Path | None:
    """The folder of this name in `~/.cache/llamatrain` (or its like), or where LLAMATRAIN_CACHE says; None without a home."""
    if named := os.environ.get(SWITCH):
        return Path(named).absolute() / NAME / name
    try:
        home = user_cache_path(NAME, appauthor=False)
    except RuntimeError:
        return None
    return home / name if home.is_absolute() else None  # `~` is left as it stands where nobody knows the home


def cache_folder(name: str) -> Path | None:
    """The wanted folder; where that cannot be written, one that goes with the program; None where nothing can be written."""
    folder = wanted(name)
    if folder and _writable(folder):
        return folder
    root = passing()
    return root / NAME / name if root and _writable(root / NAME / name) else None


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


@cache
def passing() -> Path | None:
    """A folder that goes with the program, for it and those it starts: LLAMATRAIN_CACHE tells them."""
    try:
        return goes_with_program(Path(tempfile.mkdtemp(prefix=f"{NAME}-")))
    except OSError:
        return None
