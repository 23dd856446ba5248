"""Tokens on disk: made once for the content of files and a tokenizer, found again by their key.

An entry is a folder of plain arrays, written under another name and renamed, so that it is whole or not there:
    tokens       int32      of all documents, one after the other
    marks        uint8      1 where a token is trained; absent where all are
    documents    DOCUMENT
"""

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from llamatrain.errors import DataError

TOKEN, MARK = np.dtype(np.int32), np.dtype(np.uint8)
DOCUMENT = np.dtype(
    [
        ("begin", np.int64),  # in tokens
        ("size", np.int64),
        ("file", np.int32),  # which of the files it came from
        ("line", np.int32),
        ("first", np.int32),  # its first trained token that can be a target, -1 without one
        ("single", np.bool_),  # makes one row at most; others are cut into as many as they fill
    ]
)


@cache
def cache_folder() -> Path:
    """`~/.cache/llamatrain/tokens`; where that cannot be written, a folder that goes with the program."""
    home = os.environ.get("LLAMATRAIN_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "llamatrain" / "tokens"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        passing = Path(tempfile.mkdtemp(prefix="llamatrain-tokens-"))
        atexit.register(shutil.rmtree, passing, ignore_errors=True)
        return passing


class OnDisk:
    """An array in a file, read in pieces. A memory map would do it too, but its pages count as the program's memory:
    rows come from everywhere, and each may bring a megabyte with it."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.path, self.dtype = path, dtype

    def read(self, begin: int, end: int) -> np.ndarray:
        with self.path.open("rb", buffering=0) as file:
            file.seek(begin * self.dtype.itemsize)
            return np.frombuffer(file.read((end - begin) * self.dtype.itemsize), self.dtype)


class Store:
    """The documents of some files."""

    def __init__(self, folder: Path) -> None:
        self.key = folder.name
        self.tokens = OnDisk(folder / "tokens", TOKEN)
        self.marks = OnDisk(folder / "marks", MARK) if (folder / "marks").exists() else None
        self.documents = np.fromfile(folder / "documents", DOCUMENT)


class Writer:
    """Takes documents one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, BinaryIO] = {name: (folder / name).open("wb") for name in ("tokens", "documents")}
        self.begin = self.size = 0

    def write(self, tokens: np.ndarray, marks: np.ndarray | None = None) -> None:
        """Add to the document that is open. An entry has marks for all of its tokens or for none."""
        self.files["tokens"].write(tokens.astype(TOKEN, copy=False).tobytes())
        if marks is not None:
            if "marks" not in self.files:
                self.files["marks"] = (self.folder / "marks").open("wb")
            self.files["marks"].write(marks.tobytes())
        self.size += len(tokens)

    def end(self, file: int, line: int, first: int = 0, single: bool = False) -> None:
        document = (self.begin, self.size, file, line, first, single)
        self.files["documents"].write(np.array(document, DOCUMENT).tobytes())
        self.begin, self.size = self.begin + self.size, 0

    def finish(self) -> None:
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        sizes = {name: file.tell() for name, file in self.files.items()}
        (self.folder / "sizes.json").write_text(json.dumps(sizes))

    def close(self) -> None:
        for file in self.files.values():
            file.close()


def stored(key: str, fill: Callable[[Writer], None]) -> Store:
    """The entry of a key; made by `fill` where it is not there or not whole."""
    place = cache_folder() / key
    try:
        if not _whole(place):
            _make(place, fill)
        return Store(place)
    except OSError as error:
        raise DataError(
            f"{place.parent}: tokens cannot be kept there: {error.strerror}; LLAMATRAIN_CACHE names another folder"
        ) from None


def _make(place: Path, fill: Callable[[Writer], None]) -> None:
    made = Path(tempfile.mkdtemp(prefix=".new-", dir=place.parent))
    try:
        with closing(Writer(made)) as writer:
            fill(writer)
            writer.finish()
        shutil.rmtree(place, ignore_errors=True)
        try:
            made.rename(place)
        except OSError:  # another run was faster, and it made the same
            if not _whole(place):
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _whole(place: Path) -> bool:
    try:
        sizes = json.loads((place / "sizes.json").read_text())
        return bool(sizes) and all((place / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False
