"""JSON that is read only where it holds no more than a row of the data may take."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from llamatrain.errors import DataError

VALUES = (
    1 << 18
)  # in a line: objects, lists and what they hold; each takes up to a hundred times its bytes in the file


class RecordTooLarge(DataError):
    """What takes more time or memory than one row of the data may: the row is skipped."""


def parsed(text: bytes) -> Any:
    if len(text) > VALUES and (values := count_values(text)) > VALUES:
        raise RecordTooLarge(f"{values:,} JSON values in a line, where {VALUES:,} can be")
    return json.loads(text)


def count_values(line: bytes) -> int:
    """How many values JSON has, or some more: what begins or separates them outside of strings."""
    clean = line.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in line else line
    characters = np.frombuffer(clean, np.uint8)
    within = np.logical_xor.accumulate(characters == ord('"'))
    return sum(int(np.count_nonzero((characters == ord(mark)) & ~within)) for mark in "{[,")


def strings_of(value: Any) -> Iterator[str]:
    """All of them in a value of JSON, keys included."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value
