"""Describes data files and their formats."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

from llamatrain.data.column_names import select_columns
from llamatrain.data.readers.compressed import Compression, max_unpacked_size, open_text_stream

Rows = Iterator[tuple[int, bytes]]  # rows as JSON, with their numbers in the file


@dataclass(frozen=True)
class Format:
    """A file format: how to recognize its files and how to read their rows.

    Each module in `readers/` declares its formats, and `readers/formats.py` lists them.
    """

    name: str  # also in the keys of cached tokens
    suffixes: tuple[str, ...]
    read_rows: Callable[["DataFile"], Rows] | None = None  # None: the file is one text, without rows
    unit: str = "line"  # in which messages count rows
    magic: bytes = b""  # the first bytes of every file, if it is a binary format
    matches: Callable[[bytes, bytes], bool] | None = None  # judges a first line and the next two
    check: Callable[[Path, str], None] | None = None  # raises DataError if a file is not of this format

    @property
    def is_text(self) -> bool:
        """True if its files are UTF-8 text."""
        return not self.magic


@dataclass(frozen=True)
class DataFile:
    """A file of training data: its path, format and compression."""

    path: Path
    name: str  # as the user knows it
    format: Format
    compression: Compression | None = None
    columns: Mapping[str, str] = field(default_factory=dict, hash=False)  # keys of rows -> names in the file
    keys: frozenset[str] = frozenset()  # columns of a table to read, in place of those of training data
    raw: bool = False  # True if the user declared it to be text, whatever it looks like

    @property
    def kind(self) -> Literal["text", "lines"]:
        """The kind of its documents: "text", or "lines" if each row is an object."""
        return "text" if self.format.read_rows is None else "lines"

    def locate(self, number: int) -> str:
        """Describe the position of a row for messages."""
        return f"{self.name}, {self.format.unit} {number}"

    def select_columns(self, names: Sequence[str], location: str) -> list[str]:
        """Return the columns of a table that are read; raise DataError if they make no known row."""
        if self.keys:
            return [name for name in names if name in self.keys] or list(names)
        return select_columns(names, self.columns, location)

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return self.path.stat().st_size

    @property
    def is_plain(self) -> bool:
        """True if the bytes read are the bytes of the file."""
        return not self.compression and self.format.is_text

    @property
    def is_identified_by_content(self) -> bool:
        """True if cache keys name only its content. Keys older than the other formats name no format."""
        return not self.compression and self.format.name in ("text", "lines")

    @property
    def max_size(self) -> int:
        """The number of bytes of rows or text that it may hold at most."""
        return self.size + 1 if self.is_plain else max_unpacked_size(self.size)

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Open the file as a stream of UTF-8."""
        with open_text_stream(self.path, self.name, self.compression) as stream:
            yield stream

    def rows(self) -> Rows:
        """Yield the rows as JSON, numbered by line, element or row."""
        assert self.format.read_rows is not None, f"{self.name}: text has no rows"
        return self.format.read_rows(self)
