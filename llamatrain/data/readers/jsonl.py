"""Reads JSON lines: one object per line."""

import re
from collections.abc import Iterator

from llamatrain.data.files import DataFile, Format
from llamatrain.errors import DataError

MAX_LINE_BYTES = 64 << 20  # of a file whose size says nothing about its lines
OBJECT = re.compile(rb'\{\s*"')


def read_rows(source: DataFile) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers."""
    limit = -1 if source.is_plain else MAX_LINE_BYTES
    with source.open() as file:
        number = 0
        while line := file.readline(limit):  # an iterator would hold a second copy of the line
            number += 1
            if len(line) == limit:
                raise DataError(
                    f"{source.locate(number)}: the line is longer than {limit >> 20} MiB; "
                    "if that is intended, decompress the file first",
                    code="line-too-long",
                )
            if line := line.strip():
                yield number, line


def matches(first: bytes, following: bytes) -> bool:
    """Return True if the first line begins like a JSON object."""
    return OBJECT.match(first) is not None


JSONL = Format("lines", (".jsonl", ".ndjson"), read_rows, matches=matches)
