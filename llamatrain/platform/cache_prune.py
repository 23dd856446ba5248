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

from llamatrain.platform.temp_files import DAY, NEW, removed, seized, sweep

UNUSED = 30 * DAY  # after which kernels of other versions go, and tokens
MOST = 8 * 10**9  # bytes of all tokens
OFTEN = DAY  # no two prunings are closer than that, and no two marks of use
STAMP = ".pruned"  # the file whose date is that of the last pruning
KERNELS, TOKENS, HELD = (
    re.compile("[0-9a-f]{16}"),
    "tokens",
    "tokens",
)  # names: of a version, of all entries, of an entry's file


class CacheFolder(NamedTuple):
    """Of kernels or tokens: what is removed as a whole, what of it others hold, what it takes, and when it was last used."""

    path: Path
    held: Path
    nbytes: int
    used: float


def kernels(root: Path) -> list[CacheFolder]:
    return [_folder(path, path) for path in _folders(root) if KERNELS.fullmatch(path.name)]


def tokens(root: Path) -> list[CacheFolder]:
    return [_folder(path, path / HELD) for path in _folders(root / TOKENS) if (path / HELD).is_file()]


def _folders(place: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from sorted(path for path in place.iterdir() if path.is_dir() and not path.is_symlink())


def _folder(path: Path, held: Path) -> CacheFolder:
    used = 0.0
    with suppress(OSError):  # it is removed now
        used = path.stat().st_mtime
    return CacheFolder(path, held, size_of(path), used)


def size_of(path: Path) -> int:
    """Bytes of a file, or of all that are in a folder."""
    found = 0
    for place in (path, *path.rglob("*")):
        with suppress(OSError):
            status = place.lstat()
            found += 0 if place.is_dir() and not place.is_symlink() else status.st_size
    return found


def left(folder: Path, prefix: str) -> list[Path]:
    """What processes have left that were killed."""
    found = list[Path]()
    with suppress(OSError):
        for path in sorted(folder.glob(f"{prefix}*")):
            with suppress(OSError), seized(path) as mine:
                found += [path] * mine
    return found


def lefts(root: Path) -> list[Path]:
    """Under the root of a cache."""
    return [path for folder in (root, *_folders(root)) for path in left(folder, NEW)]


# ---- in use ------------------------------------------------------------------


def used(folder: Path) -> None:
    """Note that it is; of a folder of somebody else it cannot be noted."""
    with suppress(OSError):
        if time.time() - folder.stat().st_mtime > OFTEN:
            os.utime(folder)


def remove(folders: Iterable[CacheFolder]) -> list[CacheFolder]:
    """Those that nobody holds, and which are gone then."""
    gone = []
    for each in folders:
        aside = each.path.with_name(f"{NEW}{each.path.name}-{secrets.token_hex(4)}")
        with suppress(OSError):  # another process was faster, or it is somebody else's
            with seized(each.held) as mine:
                if not mine:
                    continue
                each.path.rename(aside)
            removed(aside)
            gone.append(each)
    return gone


# ---- by itself ---------------------------------------------------------------


def prune(root: Path, version: str) -> None:
    """Where something has been written, and not more than once a day; kernels of this version stay."""
    with suppress(OSError):
        stamp = root / STAMP
        if stamp.exists() and abs(time.time() - stamp.stat().st_mtime) < OFTEN:
            return
        stamp.touch()
        for folder in (root, *_folders(root)):
            sweep(folder, NEW)
        remove(each for each in kernels(root) if each.path.name != version and _is_old(each))
        remove(beyond(tokens(root)))


def beyond(entries: list[CacheFolder]) -> list[CacheFolder]:
    """The entries that are old, and those used longest ago of the rest where these take more than they may."""
    total, going = 0, []
    for each in sorted(entries, key=lambda each: -each.used):
        total += each.nbytes
        if total > MOST or _is_old(each):
            going.append(each)
            total -= each.nbytes
    return going


def _is_old(folder: CacheFolder) -> bool:
    return time.time() - folder.used > UNUSED
