"""Prunes the cache: removes what was not used for long, and the oldest tokens if all take too much space.

Kernels have a folder for each version of sources, processor and compiler; tokens have one for each entry, and
imported models are files. A modification time is the time of the last use. A folder is renamed before it is removed,
so that it is complete or absent. Locked folders stay: a process that reads tokens or compiles kernels holds a lock. Kernels
that are running are copies in memory.
"""

import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from llamatrain.platform.locks import try_lock
from llamatrain.platform.temp_files import DAY, NEW_PREFIX, remove_leftovers, remove_path

MAX_AGE = 30 * DAY  # seconds after which kernels of other versions, tokens and models are removed
MAX_TOKEN_BYTES = 8 * 10**9  # bytes of all tokens
MIN_INTERVAL = DAY  # seconds between prunings, and between marks of use
STAMP = ".pruned"  # the file with the time of the last pruning
MODEL_FOLDER = "models"  # the folder of imported models
# the name of a version's folder, of the folder of all entries, of an entry's file
KERNEL_FOLDER, TOKEN_FOLDER, TOKEN_FILE = re.compile("[0-9a-f]{16}"), "tokens", "tokens"


class CacheFolder(NamedTuple):
    """A folder of kernels or tokens, or the file of a model: its path, the path that users lock, its size, and its last use."""

    path: Path
    lock_path: Path
    nbytes: int
    last_used: float


def list_kernels(root: Path) -> list[CacheFolder]:
    """Return the kernel folders of a cache."""
    return [
        _describe_folder(path, path) for path in _list_folders(root) if KERNEL_FOLDER.fullmatch(path.name)
    ]


def list_tokens(root: Path) -> list[CacheFolder]:
    """Return the token folders of a cache."""
    return [
        _describe_folder(path, path / TOKEN_FILE)
        for path in _list_folders(root / TOKEN_FOLDER)
        if (path / TOKEN_FILE).is_file()
    ]


def list_models(root: Path) -> list[CacheFolder]:
    """Return the imported models of a cache."""
    with suppress(OSError):
        return [_describe_folder(path, path) for path in sorted((root / MODEL_FOLDER).glob("*.gguf"))]
    return []


def _list_folders(parent: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from sorted(path for path in parent.iterdir() if path.is_dir() and not path.is_symlink())


def _describe_folder(path: Path, lock_path: Path) -> CacheFolder:
    last_used = 0.0
    with suppress(OSError):  # another process removes it now
        last_used = path.stat().st_mtime
    return CacheFolder(path, lock_path, disk_usage(path), last_used)


def disk_usage(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    total = 0
    for entry in (path, *path.rglob("*")):
        with suppress(OSError):
            status = entry.lstat()
            total += 0 if entry.is_dir() and not entry.is_symlink() else status.st_size
    return total


def find_leftovers(folder: Path, prefix: str) -> list[Path]:
    """Return unlocked paths with a prefix: processes that were killed left them."""
    leftovers = list[Path]()
    with suppress(OSError):
        for path in sorted(folder.glob(f"{prefix}*")):
            with suppress(OSError), try_lock(path) as is_free:
                leftovers += [path] * is_free
    return leftovers


def find_all_leftovers(root: Path) -> list[Path]:
    """Return the leftovers in all folders of a cache."""
    return [path for folder in (root, *_list_folders(root)) for path in find_leftovers(folder, NEW_PREFIX)]


# ---- in use ------------------------------------------------------------------


def mark_used(folder: Path) -> None:
    """Set the time of last use, if the folder is ours."""
    with suppress(OSError):
        if time.time() - folder.stat().st_mtime > MIN_INTERVAL:
            os.utime(folder)


def remove(folders: Iterable[CacheFolder]) -> list[CacheFolder]:
    """Remove the folders that nobody has locked, and return them."""
    deleted = []
    for folder in folders:
        hidden = folder.path.with_name(f"{NEW_PREFIX}{folder.path.name}-{secrets.token_hex(4)}")
        with suppress(OSError):  # another process removed it, or it belongs to another user
            with try_lock(folder.lock_path) as is_free:
                if not is_free:
                    continue
                folder.path.rename(hidden)
            remove_path(hidden)
            deleted.append(folder)
    return deleted


# ---- by itself ---------------------------------------------------------------


def prune(root: Path, version: str) -> None:
    """Prune a cache at most once a day. Kernels of `version` stay."""
    with suppress(OSError):
        stamp = root / STAMP
        if stamp.exists() and abs(time.time() - stamp.stat().st_mtime) < MIN_INTERVAL:
            return
        stamp.touch()
        for folder in (root, *_list_folders(root)):
            remove_leftovers(folder, NEW_PREFIX)
        remove(each for each in list_kernels(root) if each.path.name != version and _is_old(each))
        remove(over_limit(list_tokens(root)))
        remove(each for each in list_models(root) if _is_old(each))


def over_limit(entries: list[CacheFolder]) -> list[CacheFolder]:
    """Return entries that are too old, and the least recently used of the rest if they exceed the size limit."""
    total, outdated = 0, []
    for entry in sorted(entries, key=lambda each: -each.last_used):
        total += entry.nbytes
        if total > MAX_TOKEN_BYTES or _is_old(entry):
            outdated.append(entry)
            total -= entry.nbytes
    return outdated


def _is_old(folder: CacheFolder) -> bool:
    return time.time() - folder.last_used > MAX_AGE
