"""The cache stays small by itself: what was not used for long goes, and of tokens the oldest where all take too much.

Kernels are in a folder for each version of sources, processor and compiler, tokens in one for each entry; when a folder was
last used, its date says. It is moved aside before it is removed, so that it is whole or not there. What others hold stays:
whoever reads tokens holds them, whoever compiles holds the kernels' folder, and kernels that are run are copies in memory.
"""

import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from llamatrain.platform.temp_files import DAY, NEW_PREFIX, remove_leftovers, remove_path, try_lock

MAX_AGE = 30 * DAY  # after which kernels of other versions go, and tokens
MAX_TOKEN_BYTES = 8 * 10**9  # bytes of all tokens
MIN_INTERVAL = DAY  # no two prunings are closer than that, and no two marks of use
STAMP = ".pruned"  # the file whose date is that of the last pruning
KERNEL_FOLDER, TOKEN_FOLDER, TOKEN_FILE = (
    re.compile("[0-9a-f]{16}"),
    "tokens",
    "tokens",
)  # names: of a version, of all entries, of an entry's file


class CacheFolder(NamedTuple):
    """Of kernels or tokens: what is removed as a whole, what of it others hold, what it takes, and when it was last used."""

    path: Path
    lock_path: Path
    nbytes: int
    last_used: float


def list_kernels(root: Path) -> list[CacheFolder]:
    return [
        _describe_folder(path, path) for path in _list_folders(root) if KERNEL_FOLDER.fullmatch(path.name)
    ]


def list_tokens(root: Path) -> list[CacheFolder]:
    return [
        _describe_folder(path, path / TOKEN_FILE)
        for path in _list_folders(root / TOKEN_FOLDER)
        if (path / TOKEN_FILE).is_file()
    ]


def _list_folders(parent: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from sorted(path for path in parent.iterdir() if path.is_dir() and not path.is_symlink())


def _describe_folder(path: Path, lock_path: Path) -> CacheFolder:
    last_used = 0.0
    with suppress(OSError):  # it is removed now
        last_used = path.stat().st_mtime
    return CacheFolder(path, lock_path, disk_usage(path), last_used)


def disk_usage(path: Path) -> int:
    """Bytes of a file, or of all that are in a folder."""
    total = 0
    for entry in (path, *path.rglob("*")):
        with suppress(OSError):
            status = entry.lstat()
            total += 0 if entry.is_dir() and not entry.is_symlink() else status.st_size
    return total


def find_leftovers(folder: Path, prefix: str) -> list[Path]:
    """What processes have left that were killed."""
    leftovers = list[Path]()
    with suppress(OSError):
        for path in sorted(folder.glob(f"{prefix}*")):
            with suppress(OSError), try_lock(path) as is_free:
                leftovers += [path] * is_free
    return leftovers


def find_all_leftovers(root: Path) -> list[Path]:
    """Under the root of a cache."""
    return [path for folder in (root, *_list_folders(root)) for path in find_leftovers(folder, NEW_PREFIX)]


# ---- in use ------------------------------------------------------------------


def mark_used(folder: Path) -> None:
    """Note that it is; of a folder of somebody else it cannot be noted."""
    with suppress(OSError):
        if time.time() - folder.stat().st_mtime > MIN_INTERVAL:
            os.utime(folder)


def remove(folders: Iterable[CacheFolder]) -> list[CacheFolder]:
    """Those that nobody holds, and which are gone then."""
    deleted = []
    for folder in folders:
        hidden = folder.path.with_name(f"{NEW_PREFIX}{folder.path.name}-{secrets.token_hex(4)}")
        with suppress(OSError):  # another process was faster, or it is somebody else's
            with try_lock(folder.lock_path) as is_free:
                if not is_free:
                    continue
                folder.path.rename(hidden)
            remove_path(hidden)
            deleted.append(folder)
    return deleted


# ---- by itself ---------------------------------------------------------------


def prune(root: Path, version: str) -> None:
    """Where something has been written, and not more than once a day; kernels of this version stay."""
    with suppress(OSError):
        stamp = root / STAMP
        if stamp.exists() and abs(time.time() - stamp.stat().st_mtime) < MIN_INTERVAL:
            return
        stamp.touch()
        for folder in (root, *_list_folders(root)):
            remove_leftovers(folder, NEW_PREFIX)
        remove(each for each in list_kernels(root) if each.path.name != version and _is_old(each))
        remove(over_limit(list_tokens(root)))


def over_limit(entries: list[CacheFolder]) -> list[CacheFolder]:
    """The entries that are old, and those used longest ago of the rest where these take more than they may."""
    total, outdated = 0, []
    for entry in sorted(entries, key=lambda each: -each.last_used):
        total += entry.nbytes
        if total > MAX_TOKEN_BYTES or _is_old(entry):
            outdated.append(entry)
            total -= entry.nbytes
    return outdated


def _is_old(folder: CacheFolder) -> bool:
    return time.time() - folder.last_used > MAX_AGE
