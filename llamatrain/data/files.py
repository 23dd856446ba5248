"""A file of data, and how it is read."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

from llamatrain.data.file_kind import Form
from llamatrain.data.readers.compressed import FREE, RATIO, stream_of

UNITS = {"json": "element", "parquet": "row"}


@dataclass(frozen=True)
class DataFile:
    path: Path
    name: str  # as the user knows it
    form: Form
    packed: Literal["gz", "zst"] | None = None
    columns: Mapping[str, str] = field(
        default_factory=dict, hash=False
    )  # keys of rows that have other names in the file
    raw: bool = False  # said to be text, whatever it looks like

    @property
    def kind(self) -> Literal["text", "lines"]:
        """Of what its tokens are made: text, or rows that are objects."""
        return "text" if self.form == "text" else "lines"

    @property
    def unit(self) -> str:
        """What its rows are counted in: by lines where there are lines."""
        return UNITS.get(self.form, "line")

    def place(self, number: int) -> str:
        """Of a row, in messages."""
        return f"{self.name}, {self.unit} {number}"

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    @property
    def is_plain(self) -> bool:
        """Whether what is read of it are its own bytes."""
        return not self.packed and self.form != "parquet"

    @property
    def is_as_ever(self) -> bool:
        """Whether its name and its bytes are all that there is to know of it."""
        return not self.packed and self.form in ("text", "lines")

    @property
    def most(self) -> int:
        """Bytes of rows or text that it may hold."""
        return self.size + 1 if self.is_plain else max(FREE, RATIO * self.size)

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        with stream_of(self.path, self.name, self.packed) as stream:
            yield stream
