"""Caches tokens on disk, keyed by the content of the files and the tokenizer.

An entry is a folder of plain arrays, written under a temporary name and renamed, so that it is complete or
absent:
    sizes.json   the size and the CRC-32 of each array's file
    tokens       int32      of all documents, one after the other
    marks        uint8      1 where a token is trained; absent where all are
    documents    DOCUMENT
    notes        JSON: an object of notes to print; absent where there are none
"""

import json
import os
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from llamatrain.compiler.cache import cache_key
from llamatrain.errors import DataError
from llamatrain.platform import cache_dir
from llamatrain.platform.cache_prune import mark_used, prune
from llamatrain.platform.files import (
    CAN_MOVE_OPEN_FILES,
    open_regular,
    raise_open_file_limit,
    read_at,
    read_regular,
)
from llamatrain.platform.locks import lock, lock_shared
from llamatrain.platform.memory import trim_heap
from llamatrain.platform.temp_files import NEW_PREFIX, delete_at_exit, remove_leftovers, remove_path
from llamatrain.platform.terminal import log_line

TOKEN = np.dtype(np.int32)
MARK = np.dtype(np.uint8)
DOCUMENT = np.dtype(
    [
        ("begin", np.int64),  # in tokens
        ("size", np.int64),
        ("file", np.int32),  # index of its file
        ("line", np.int32),
        ("first", np.int32),  # its first trained target; -1: none, -2: too large, -3: refused
        ("single", np.bool_),  # makes at most one row; others are cut into as many as they fill
    ]
)
READ_BYTES = 1 << 20  # bytes checked at once
CHECKED_DOCUMENTS = 1 << 16  # documents checked at once
MIN_FIRST = -3  # of a document's `first`
ATTEMPTS = 10  # to publish an entry while other runs do the same


@cache
def cache_folder() -> Path:
    """Return `~/.cache/llamatrain/tokens`, or a temporary folder if that is not writable."""
    if (folder := cache_dir.writable_cache_dir("tokens")) is None:
        raise DataError(
            "no folder for tokens is writable, not even a temporary one; "
            f"set {cache_dir.CACHE_VARIABLE} to a writable folder",
            code="cache-not-writable",
        )
    return folder


class StoreLimits(NamedTuple):
    """The largest valid numbers in an entry, which compiled code relies on."""

    ids: int  # the vocabulary's size
    files: int
    documents: int


class DiskArray:
    """An array in a file, read in pieces.

    A memory map would count its pages as the program's memory: rows come from everywhere, and each may load a
    megabyte. The file stays open, because it may be deleted meanwhile.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.folder = path.parent.parent
        self.dtype = dtype
        self.file, status = open_regular(path)
        self.size = status.st_size
        weakref.finalize(self, os.close, self.file)
        lock_shared(self.file)
        raise_open_file_limit(2 * self.file)

    def read(self, begin: int, end: int) -> np.ndarray:
        """Read the numbers from `begin` to `end`."""
        size = self.dtype.itemsize
        raw = read_at(self.file, (end - begin) * size, begin * size)
        if len(raw) < min(end * size, self.size) - begin * size:
            raise DataError(
                f"{self.folder}: the cached tokens were truncated while they were read; run the same "
                "command again",
                code="truncated-file",
            )
        return np.frombuffer(raw, self.dtype)

    def checksum(self, below: int) -> list[int]:
        """Return the size and CRC-32, as the writer counts them.

        Raise ValueError if a number is not less than `below`.
        """
        size = crc = 0
        while piece := read_at(self.file, READ_BYTES, size):
            size += len(piece)
            crc = zlib.crc32(piece, crc)
            if np.frombuffer(piece, f"u{self.dtype.itemsize}").max() >= below:
                raise ValueError("a number is out of range")
        return [size, crc]


class TokenStore:
    """The tokens, marks and documents of some files, as a cache entry holds them."""

    def __init__(self, folder: Path, key: str, max_documents: int) -> None:
        self.key = self.identity = key  # checkpoints store `identity`
        self.tokens = DiskArray(folder / "tokens", TOKEN)
        self.marks = DiskArray(folder / "marks", MARK) if os.path.lexists(folder / "marks") else None
        self.documents = np.frombuffer(
            read_regular(folder / "documents", max_documents * DOCUMENT.itemsize)[0], DOCUMENT
        )
        self.raw_notes = (
            read_regular(folder / "notes", READ_BYTES)[0] if os.path.lexists(folder / "notes") else b""
        )
        self.notes = {
            str(kind): str(detail) for kind, detail in dict(json.loads(self.raw_notes or b"{}")).items()
        }

    def sizes(self) -> dict[str, int]:
        """Return the size of each file of the entry."""
        marks = {} if self.marks is None else {"marks": self.marks.size}
        notes = {"notes": len(self.raw_notes)} if self.raw_notes else {}
        return {"tokens": self.tokens.size, "documents": self.documents.nbytes, **marks, **notes}

    def checksums(self, limits: StoreLimits) -> dict[str, list[int]]:
        """Return the size and CRC-32 of each file, as sizes.json lists them."""
        documents = [self.documents.nbytes, zlib.crc32(self.documents.view(np.uint8).data)]
        marks = {} if self.marks is None else {"marks": self.marks.checksum(2)}
        notes = {"notes": [len(self.raw_notes), zlib.crc32(self.raw_notes)]} if self.raw_notes else {}
        return {"tokens": self.tokens.checksum(limits.ids), "documents": documents, **marks, **notes}

    def is_consistent(self, limits: StoreLimits) -> bool:
        """Return True if the documents cover exactly these tokens, and each token has a mark if any has."""
        count = self.tokens.size // TOKEN.itemsize
        if self.marks and self.marks.size != count:
            return False
        end = 0
        flag = int(DOCUMENT.fields["single"][1])  # type: ignore[index]
        for start in range(0, len(self.documents), CHECKED_DOCUMENTS):
            documents = self.documents[start : start + CHECKED_DOCUMENTS]
            size = documents["size"]
            first = documents["first"]
            if (size < 0).any() or (size > count).any():
                return False
            ends = end + np.cumsum(size)
            flags = documents.view(np.uint8).reshape(-1, DOCUMENT.itemsize)[:, flag]
            if not (
                (documents["begin"] == ends - size).all()
                and ((first >= MIN_FIRST) & (first < np.maximum(size, 1))).all()
                and (
                    (documents["file"] >= 0)
                    & (documents["file"] < limits.files)
                    & (documents["line"] > 0)
                    & (flags <= 1)
                ).all()
            ):
                return False
            end = int(ends[-1])
        return end == count


@contextmanager
def _cache_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError of the cache into a DataError, so that it is not mistaken for one of the data files."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{folder}: cannot store tokens: {error.strerror or error}; set LLAMATRAIN_CACHE to "
            "another folder",
            code="cache-not-writable",
        ) from None


class TokenStoreWriter:
    """Writes documents into a cache entry, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, BinaryIO] = {}
        self.sums: dict[str, list[int]] = {}
        self.begin = self.size = 0
        for name in ("tokens", "documents"):  # they exist even if they are empty
            self._append(name, b"")

    def write(self, tokens: np.ndarray, marks: np.ndarray | None = None) -> None:
        """Append to the open document. An entry has marks for all of its tokens or for none."""
        self._append("tokens", np.ascontiguousarray(tokens, TOKEN).view(np.uint8).data)
        if marks is not None:
            self._append("marks", np.ascontiguousarray(marks).data)
        self.size += len(tokens)

    def end_document(self, file: int, line: int, first: int = 0, single: bool = False) -> None:
        """Finish the open document."""
        document = (self.begin, self.size, file, line, first, single)
        self._append("documents", np.array(document, DOCUMENT).tobytes())
        self.begin += self.size
        self.size = 0

    def write_notes(self, notes: Mapping[str, str]) -> None:
        """Write the notes on the data."""
        if notes:
            self._append("notes", json.dumps(notes).encode())

    def _append(self, name: str, data: bytes | memoryview) -> None:
        with _cache_errors(self.folder.parent):
            if name not in self.files:
                self.files[name] = (self.folder / name).open("wb")
            self.files[name].write(data)
        size, crc = self.sums.get(name, (0, 0))
        self.sums[name] = [size + len(data), zlib.crc32(data, crc)]

    def finish(self) -> None:
        """Flush all files to disk and write their sums."""
        with _cache_errors(self.folder.parent):
            for file in self.files.values():
                file.flush()
                os.fsync(file.fileno())
            (self.folder / "sizes.json").write_text(json.dumps(self.sums))

    def close(self) -> None:
        """Close all files."""
        for file in self.files.values():
            with suppress(OSError):  # finished files are flushed; otherwise another error is being raised
                file.close()


def open_or_build(key: str, fill: Callable[[TokenStoreWriter], None], limits: StoreLimits) -> TokenStore:
    """Open the cache entry of a key, or build it with `fill` if it is missing or damaged.

    An existing entry is used even in a folder that is not writable.
    """
    folder = cache_dir.default_cache_dir("tokens")
    if folder and (store := _open_valid(folder / key, limits)):
        mark_used(folder / key)
        return store
    if folder and os.path.lexists(folder / key):
        log_line(f"{folder / key}: the cached tokens are damaged; encoding the data again")
    entry = cache_folder() / key
    if entry.parent != folder and (store := _open_valid(entry, limits)):
        return store
    return _build(entry, fill, limits)


def _open_valid(entry: Path, limits: StoreLimits) -> TokenStore | None:
    """Open an entry; return None unless its files match their sums and are consistent."""
    try:
        sums = json.loads(read_regular(entry / "sizes.json", READ_BYTES)[0])
        sizes = {name: size for name, (size, _) in sums.items()}
        store = TokenStore(entry, entry.name, limits.documents)
        if store.sizes() == sizes and store.is_consistent(limits) and store.checksums(limits) == sums:
            return store
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):  # the last: deeply nested JSON
        pass
    return None


def _build(entry: Path, fill: Callable[[TokenStoreWriter], None], limits: StoreLimits) -> TokenStore:
    """Build an entry in a temporary folder and publish it."""
    with ExitStack() as cleanup:
        # Lock the parent, so that the new folder is visible only once it is locked.
        with _cache_errors(entry.parent), lock(entry.parent):
            remove_leftovers(entry.parent, NEW_PREFIX)
            temporary = delete_at_exit(Path(tempfile.mkdtemp(prefix=NEW_PREFIX, dir=entry.parent)))
            cleanup.callback(remove_path, temporary)
        with closing(TokenStoreWriter(temporary)) as writer:
            fill(writer)
            writer.finish()
            trim_heap()
        with _cache_errors(entry.parent):
            store = _publish(temporary, entry, limits)
    prune(entry.parent.parent, cache_key())
    return store


def _publish(temporary: Path, entry: Path, limits: StoreLimits) -> TokenStore:
    """Rename a new entry to its final place; return it, or the entry of a run that was faster."""
    # opened before others can see and move it, where open files may be moved
    store = TokenStore(temporary, entry.name, limits.documents) if CAN_MOVE_OPEN_FILES else None
    for attempt in range(ATTEMPTS):
        with suppress(OSError):
            temporary.rename(entry)
            return store or TokenStore(entry, entry.name, limits.documents)
        if other := _open_valid(entry, limits):
            return other
        aside = temporary.with_name(f"{temporary.name}-{attempt}")
        with suppress(OSError):  # another run moved it, or reads it
            entry.rename(aside)
        remove_path(aside)
    temporary.rename(entry)
    return store or TokenStore(entry, entry.name, limits.documents)
