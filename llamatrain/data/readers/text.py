"""Reads data files as text chunks, as numbered rows, or as samples that begin at a pattern."""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from llamatrain.config.messages import worded
from llamatrain.config.options import flag_of
from llamatrain.data.file_kind import Utf8, check_text
from llamatrain.data.files import DataFile
from llamatrain.data.readers import csv, parquet
from llamatrain.data.readers.compressed import WIDE
from llamatrain.data.readers.json_array import LONGEST, elements_of
from llamatrain.data.tokenizer.tokenizer import to_bytes
from llamatrain.errors import DataError
from llamatrain.io.mapped_file import map_file, verify_unchanged
from llamatrain.platform.temp_files import create_temp_file, remove_path

CHUNK = 1 << 20
Place = tuple[int, int]  # a file and a line, by their numbers


class JsonLine(NamedTuple):
    """A row of a file: its JSON and its position."""

    file: int  # its number
    number: int
    text: bytes
    place: str

    @property
    def key(self) -> Place:
        """The file index and line number."""
        return self.file, self.number


def chunks_of(source: DataFile) -> Iterator[bytes]:
    """Yield the whole text in chunks, cut anywhere."""
    with source.opened() as file:
        offset, encoding = 0, Utf8(source.name, source.raw)
        while chunk := file.read(CHUNK):
            check_text(chunk, source.name, offset)
            encoding.feed(chunk)
            offset += len(chunk)
            yield chunk


def rows_of(source: DataFile) -> Iterator[tuple[int, bytes]]:
    """Yield the rows of a file as JSON, numbered by line, element or row."""
    if source.form == "parquet":
        with plain_file(source) as path:
            parquet.check(path, source.name)
            yield from parquet.rows_of(path, source.name, source.columns)
        return
    with source.opened() as file:
        if source.form == "json":
            yield from elements_of(file, source.name)
        elif source.form in csv.DELIMITERS:
            yield from csv.rows_of(file, source.form, source.name, source.columns)
        else:
            yield from lines_of(file, source)


def lines_of(file: BinaryIO, source: DataFile) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers."""
    number, most = 0, -1 if source.is_plain else LONGEST
    while line := file.readline(most):  # which an iterator would hold beside the text
        number += 1
        if len(line) == most:
            raise DataError(
                f"{source.name}, line {number}: is longer than {LONGEST >> 20} MiB; unpack the file if it is meant"
            )
        if line := line.strip():
            yield number, line


@contextmanager
def plain_file(source: DataFile) -> Iterator[Path]:
    """Provide a seekable file: the file itself, or a decompressed UTF-8 copy of it."""
    with source.path.open("rb") as file:
        wide = source.form == "text" and file.read(2) in WIDE
    if not source.packed and not wide:
        yield source.path
        return
    path = create_temp_file()
    try:
        with path.open("wb") as made, source.opened() as stream:
            while chunk := stream.read(CHUNK):
                made.write(chunk)
        yield path
    finally:
        remove_path(path)


def boundary(text: bytes | mmap.mmap, at: int) -> int:
    """Return the next offset at which a UTF-8 character begins."""
    while at < len(text) and text[at] & 0xC0 == 0x80:
        at += 1
    return at


def samples_after(source: DataFile, pattern: str, include: bool, longest: int | None) -> Iterator[bytes]:
    """Yield the text after each match of a pattern, up to the next match.

    With `longest`, a sample runs on beyond the next match, up to that many bytes.
    """
    with plain_file(source) as path:
        yield from samples_in(path, source, to_bytes(pattern), include, longest)


def samples_in(
    path: Path, source: DataFile, mark: bytes, include: bool, longest: int | None
) -> Iterator[bytes]:
    """Yield the samples of a seekable file."""
    text = map_file(path, "a text")
    with verify_unchanged([text]):
        name = source.name
        encoding, read, at = Utf8(name, source.raw), 0, text.find(mark)
        if at < 0:
            told = f"({flag_of('escape')} reads \\n as the end of a line)"
            raise DataError(
                f"{name}: the sample start {worded(mark.decode('utf-8', 'replace'))} is not in it {told}"
            )
        while at >= 0:
            following = text.find(mark, at + len(mark))
            begin = at if include else at + len(mark)
            end = following if following >= 0 else len(text)
            if longest is not None:
                end = boundary(text, min(begin + longest, len(text)))
            sample = text[begin:end]
            check_text(sample, name, begin)
            encoding.feed(text[read:end])
            read = max(read, end)
            yield sample
            at = following
