"""Where things are kept that could be made again, such as compiled kernels and tokens."""

import os
import stat
import tempfile
from functools import cache
from pathlib import Path

from platformdirs import user_cache_path

from llamatrain.platform.temp_files import create_temp_folder

CACHE_VARIABLE = "LLAMATRAIN_CACHE"
NAME = "llamatrain"
PROBE_BYTES = 1 << 16  # bytes that a folder must have room for


def default_cache_dir(name: str) -> Path | None:
    """The folder of this name in `~/.cache/llamatrain` (or its like), or where LLAMATRAIN_CACHE says; None without a home."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named).absolute() / NAME / name
    try:
        home = user_cache_path(NAME, appauthor=False)
    except RuntimeError:
        return None
    return home / name if home.is_absolute() else None  # `~` is left as it stands where nobody knows the home


def fallback_cache_dir(name: str) -> Path | None:
    """Return the folder of this name for a user whose cache cannot be written: among temporary files, and private."""
    return Path(tempfile.gettempdir()) / f"{NAME}-{os.geteuid()}" / name if hasattr(os, "geteuid") else None


def is_private(folder: Path) -> bool:
    """Tell whether a folder is this user's and open to nobody else: among temporary files anybody may make one."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.geteuid()
        and not stat.S_IMODE(status.st_mode) & 0o077
    )


def writable_cache_dir(name: str) -> Path | None:
    """The wanted folder; where that cannot be written, one that goes with the program; None where nothing can be written."""
    folder = default_cache_dir(name)
    if folder and not find_write_problem(folder):
        return folder
    root = get_temp_folder()
    return root / NAME / name if root and not find_write_problem(root / NAME / name) else None


def find_write_problem(folder: Path) -> str:
    """Why nothing can be kept in a folder; where something can, it is there now, and there is nothing to say."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            probe.write(bytes(PROBE_BYTES))
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror or error})"
    return ""


@cache
def get_temp_folder() -> Path | None:
    """A folder that goes with the program."""
    try:
        return create_temp_folder()
    except OSError:
        return None
