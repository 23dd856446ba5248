"""Tokens on disk: made once for the content of files and a tokenizer, found again by their key.

An entry is a folder of plain arrays, written under another name and renamed, so that it is whole or not there:
    sizes.json   the size and the CRC-32 of each of the arrays' files
    tokens       int32      of all documents, one after the other
    marks        uint8      1 where a token is trained; absent where all are
    documents    DOCUMENT
"""

import json
import os
import tempfile
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from llamatrain.errors import DataError
from llamatrain.machine import cachefolder
from llamatrain.machine.memory import give_back
from llamatrain.machine.temporary import goes_with_program, removed

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

TOKEN, MARK = np.dtype(np.int32), np.dtype(np.uint8)
DOCUMENT = np.dtype(
    [
        ("begin", np.int64),  # in tokens
        ("size", np.int64),
        ("file", np.int32),  # which of the files it came from
        ("line", np.int32),
        ("first", np.int32),  # its first trained token that can be a target, -1 without one, -2 where the row was too much
        ("single", np.bool_),  # makes one row at most; others are cut into as many as they fill
    ]
)
NEW = ".new-"  # begins the name of what is not an entry yet, or not any more
DAY = 24 * 60 * 60  # seconds without a write, after which a run that was making an entry is gone, where folders cannot be held
PIECE = 1 << 20  # bytes read at once to check them
ATTEMPTS = 10  # to put an entry in its place, where other runs do the same


@cache
def cache_folder() -> Path:
    """`~/.cache/llamatrain/tokens`; where that cannot be written, a folder that goes with the program."""
    if (folder := cachefolder.cache_folder("tokens")) is None:
        raise DataError(f"tokens can be kept nowhere, not even for a while: {cachefolder.SWITCH} names a folder for them")
    return folder


class OnDisk:
    """An array in a file, read in pieces. A memory map would do it too, but its pages count as the program's memory:
    rows come from everywhere, and each may bring a megabyte with it. The file stays open: it may be removed meanwhile."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self.file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.file)
        _allow_files(2 * self.file)

    def read(self, begin: int, end: int) -> np.ndarray:
        size = self.dtype.itemsize
        return np.frombuffer(os.pread(self.file, (end - begin) * size, begin * size), self.dtype)

    def sum(self) -> list[int]:
        """Size and CRC-32, as `StoreWriter` counts them."""
        size = crc = 0
        while piece := os.pread(self.file, PIECE, size):
            size, crc = size + len(piece), zlib.crc32(piece, crc)
        return [size, crc]


def _allow_files(count: int) -> None:
    """Data of a thousand files keeps more of them open than a program may by default, which is often 1024."""
    try:
        import resource
    except ImportError:  # not a Unix
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and count > soft:
        allowed = 2 * count if hard == resource.RLIM_INFINITY else min(2 * count, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


class Store:
    """The documents of some files."""

    def __init__(self, folder: Path, key: str) -> None:
        self.key = key
        self.tokens = OnDisk(folder / "tokens", TOKEN)
        self.marks = OnDisk(folder / "marks", MARK) if (folder / "marks").exists() else None
        self.documents = np.fromfile(folder / "documents", DOCUMENT)

    def sums(self) -> dict[str, list[int]]:
        """What sizes.json says of these files."""
        documents = [self.documents.nbytes, zlib.crc32(self.documents.view(np.uint8).data)]
        marks = {} if self.marks is None else {"marks": self.marks.sum()}
        return {"tokens": self.tokens.sum(), "documents": documents, **marks}


@contextmanager
def _keeping(folder: Path) -> Iterator[None]:
    """Around what is done to the cache itself, and nothing else: its errors are told from those of the sources."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{folder}: tokens cannot be kept there: {error.strerror or error}; LLAMATRAIN_CACHE names another folder"
        ) from None


class StoreWriter:
    """Takes documents one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, BinaryIO] = {}
        self.sums: dict[str, list[int]] = {}
        self.begin = self.size = 0
        for name in ("tokens", "documents"):  # they are there even where they stay empty
            self._put(name, b"")

    def write(self, tokens: np.ndarray, marks: np.ndarray | None = None) -> None:
        """Add to the document that is open. An entry has marks for all of its tokens or for none."""
        self._put("tokens", np.ascontiguousarray(tokens, TOKEN).view(np.uint8).data)
        if marks is not None:
            self._put("marks", np.ascontiguousarray(marks).data)
        self.size += len(tokens)

    def end(self, file: int, line: int, first: int = 0, single: bool = False) -> None:
        document = (self.begin, self.size, file, line, first, single)
        self._put("documents", np.array(document, DOCUMENT).tobytes())
        self.begin, self.size = self.begin + self.size, 0

    def _put(self, name: str, data: bytes | memoryview) -> None:
        with _keeping(self.folder.parent):
            if name not in self.files:
                self.files[name] = (self.folder / name).open("wb")
            self.files[name].write(data)
        size, crc = self.sums.get(name, (0, 0))
        self.sums[name] = [size + len(data), zlib.crc32(data, crc)]

    def finish(self) -> None:
        with _keeping(self.folder.parent):
            for file in self.files.values():
                file.flush()
                os.fsync(file.fileno())
            (self.folder / "sizes.json").write_text(json.dumps(self.sums))

    def close(self) -> None:
        for file in self.files.values():
            with suppress(OSError):  # what is finished is written; else another error is on its way
                file.close()


def stored(key: str, fill: Callable[[StoreWriter], None]) -> Store:
    """The entry of a key; made by `fill` where it is not there or not whole."""
    place = cache_folder() / key
    return _whole(place) or _made(place, fill)


def _whole(place: Path) -> Store | None:
    """The entry there, if its files are what was written."""
    try:
        sums = json.loads((place / "sizes.json").read_text())
        store = Store(place, place.name)
        return store if store.sums() == sums else None
    except (OSError, ValueError, RecursionError):  # the last: JSON that is nested too deep
        return None


def _made(place: Path, fill: Callable[[StoreWriter], None]) -> Store:
    with ExitStack() as held:
        with _keeping(place.parent), _held(place.parent):  # so that nobody sees the new folder before it is held
            _sweep(place.parent)
            made = goes_with_program(Path(tempfile.mkdtemp(prefix=NEW, dir=place.parent)))
            held.callback(removed, made)
            held.enter_context(_held(made))
        with closing(StoreWriter(made)) as writer:
            fill(writer)
            writer.finish()
            give_back()
        with _keeping(place.parent):
            return _placed(made, place)


def _placed(made: Path, place: Path) -> Store:
    """The entry that has the place in the end: the one made, or that of a run that was faster."""
    store = Store(made, place.name)  # opened before others can see it, and move it
    for attempt in range(ATTEMPTS):
        with suppress(OSError):
            made.rename(place)
            return store
        if faster := _whole(place):
            return faster
        aside = made.with_name(f"{made.name}-{attempt}")
        with suppress(FileNotFoundError):  # another run has moved it
            place.rename(aside)
        removed(aside)
    made.rename(place)
    return store


def _sweep(folder: Path) -> None:
    """Remove what runs that were killed have left."""
    for left in folder.glob(f"{NEW}*"):
        with suppress(OSError):  # its own run, or another that sweeps, removes it now
            age = time.time() - max(path.lstat().st_mtime for path in (left, *left.glob("*")))
            if age > DAY or _free(left):
                removed(left)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """An open folder is a lock that ends with its process, however that ends; where there is no such thing, its age tells."""
    place = os.open(folder, os.O_RDONLY) if fcntl else None
    try:
        if fcntl and place is not None:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(place, fcntl.LOCK_EX)
        yield
    finally:
        if place is not None:
            os.close(place)


def _free(folder: Path) -> bool:
    """Whether nobody holds it."""
    if not fcntl:
        return False
    place = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(place)
