"""The folders for compiled kernels and encoded tokens, which can be recreated."""

import os
import stat
import tempfile
from functools import cache
from pathlib import Path

from platformdirs import user_cache_path

from llamatrain.platform.files import is_private, user_name_part
from llamatrain.platform.temp_files import create_temp_folder

CACHE_VARIABLE = "LLAMATRAIN_CACHE"
NAME = "llamatrain"
PROBE_BYTES = 1 << 16  # bytes that must be writable to a folder


def default_cache_dir(name: str) -> Path | None:
    """Return the folder `name` in `~/.cache/llamatrain`, or under LLAMATRAIN_CACHE; None without a home."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named).absolute() / NAME / name
    try:
        home = user_cache_path(NAME, appauthor=False)
    except RuntimeError:
        return None
    return home / name if home.is_absolute() else None  # without a home, `~` is not expanded


def fallback_cache_dir(name: str) -> Path | None:
    """Return a private folder among temporary files, for users whose cache is read-only."""
    user = user_name_part()
    return Path(tempfile.gettempdir()) / f"{NAME}-{user}" / name if user else None


def is_private_folder(folder: Path) -> bool:
    """Return True if a folder belongs to this user and nobody else can enter it.

    Anybody may create a folder among temporary files.
    """
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and is_private(status)


def writable_cache_dir(name: str) -> Path | None:
    """Return the default folder; if it is read-only, one that is deleted at exit; None if there is neither."""
    folder = default_cache_dir(name)
    if folder and not find_write_problem(folder):
        return folder
    root = get_temp_folder()
    return root / NAME / name if root and not find_write_problem(root / NAME / name) else None


def find_write_problem(folder: Path) -> str:
    """Return why nothing can be written to a folder, or an empty string.

    The folder is created if possible.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            probe.write(bytes(PROBE_BYTES))
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror or error})"
    return ""


@cache
def get_temp_folder() -> Path | None:
    """Return a folder that is deleted at exit, or None if none can be created."""
    try:
        return create_temp_folder()
    except OSError:
        return None
