"""Parses JSON with a limit on the number of values in one row."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from llamatrain.errors import DataError

MAX_VALUES = 1 << 18  # in a row; in memory, each takes up to a hundred times its bytes in the file


class RecordTooLarge(DataError):
    """A row takes too much time or memory; it is skipped."""


def parse_json(text: bytes) -> Any:
    """Parse a row of JSON; raise RecordTooLarge if it has too many values."""
    if len(text) > MAX_VALUES and (count := count_values(text)) > MAX_VALUES:
        raise RecordTooLarge(
            f"{count:,} JSON values in a row (the limit is {MAX_VALUES:,}); split it", code="row-too-large"
        )
    return json.loads(text)


def count_values(line: bytes) -> int:
    """Return an upper bound on the number of JSON values in a line.

    It counts the characters outside of strings that begin or separate values.
    """
    clean = line.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in line else line
    characters = np.frombuffer(clean, np.uint8)
    inside = np.logical_xor.accumulate(characters == ord('"'))
    return sum(int(np.count_nonzero((characters == ord(mark)) & ~inside)) for mark in "{[,")


def iterate_strings(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, including keys."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            pending += [*value, *value.values()]
        elif isinstance(value, list):
            pending += value
