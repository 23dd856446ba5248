"""Metadata values of a GGUF file: a kind and the bytes that follow it in the file."""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from llamatrain.gguf.constants import GGUFValueType

Kind: TypeAlias = GGUFValueType
# The types in the file; a bool is a byte that is zero or not.
DTYPES: dict[Kind, np.dtype] = {
    Kind.UINT8: np.dtype("<u1"),
    Kind.INT8: np.dtype("<i1"),
    Kind.UINT16: np.dtype("<u2"),
    Kind.INT16: np.dtype("<i2"),
    Kind.UINT32: np.dtype("<u4"),
    Kind.INT32: np.dtype("<i4"),
    Kind.FLOAT32: np.dtype("<f4"),
    Kind.BOOL: np.dtype("<u1"),
    Kind.UINT64: np.dtype("<u8"),
    Kind.INT64: np.dtype("<i8"),
    Kind.FLOAT64: np.dtype("<f8"),
}
U32 = struct.Struct("<I")
LENGTH = struct.Struct("<Q")  # before the bytes of a string
ARRAY = struct.Struct("<IQ")  # before the items of an array: their kind and count


@dataclass(frozen=True, slots=True)
class Value:
    """A value as it is in a file. Copied from file to file, it keeps its bytes."""

    kind: Kind
    raw: bytes | memoryview

    def decode(self) -> Any:
        """Return an int, float, bool or str; for an array a numpy view, or a list of strings or arrays.

        Bytes that are not UTF-8 become lone surrogates (`surrogateescape`). The bytes must be valid: the
        reader has checked those that come from a file.
        """
        if self.kind is Kind.STRING:
            return str(self.raw[LENGTH.size :], "utf-8", "surrogateescape")
        if self.kind is Kind.ARRAY:
            # Strings are sliced faster from bytes; numbers are not copied.
            return _decode_array(
                self.raw if ARRAY.unpack_from(self.raw)[0] in DTYPES else bytes(self.raw), 0
            )[0]
        value = np.frombuffer(self.raw, DTYPES[self.kind], 1)[0].item()
        return bool(value) if self.kind is Kind.BOOL else value


def _decode_array(raw: bytes | memoryview, offset: int) -> tuple[Any, int]:
    """Return the items of the array at an offset, and the offset behind it."""
    kind, count = ARRAY.unpack_from(raw, offset)
    offset += ARRAY.size
    if kind == Kind.STRING:
        return _decode_strings(raw, offset, count)
    if kind == Kind.ARRAY:
        arrays = []
        for _ in range(count):
            items, offset = _decode_array(raw, offset)
            arrays.append(items)
        return arrays, offset
    dtype = DTYPES[Kind(kind)]
    numbers = np.frombuffer(raw, dtype, count, offset)
    return numbers != 0 if kind == Kind.BOOL else numbers, offset + count * dtype.itemsize


def _decode_strings(raw: bytes | memoryview, offset: int, count: int) -> tuple[list[str], int]:
    found, length_at = [], LENGTH.unpack_from
    for _ in range(count):
        start = offset + LENGTH.size
        offset = start + length_at(raw, offset)[0]
        found.append(str(raw[start:offset], "utf-8", "surrogateescape"))
    return found, offset


# ---- making values ---------------------------------------------------------


def encode_string(text: str) -> bytes:
    """Return a string as GGUF stores it: its length, then its bytes."""
    raw = text.encode("utf-8", "surrogateescape")
    return LENGTH.pack(len(raw)) + raw


def number(kind: Kind, value: float) -> Value:
    """Return a value that is a number or bool. Raise OverflowError if the kind cannot hold it."""
    return Value(kind, np.array(value, DTYPES[kind]).tobytes())


def string(text: str) -> Value:
    """Return a value that is a string."""
    return Value(Kind.STRING, encode_string(text))


def numbers(kind: Kind, items: Sequence[float] | np.ndarray) -> Value:
    """Return a value that is an array of numbers."""
    array = np.asarray(items, DTYPES[kind])
    return Value(Kind.ARRAY, ARRAY.pack(kind, array.size) + array.tobytes())


def strings(items: Iterable[str]) -> Value:
    """Return a value that is an array of strings."""
    encoded = [encode_string(item) for item in items]
    return Value(Kind.ARRAY, ARRAY.pack(Kind.STRING, len(encoded)) + b"".join(encoded))


u32 = partial(number, Kind.UINT32)
u64 = partial(number, Kind.UINT64)
f32 = partial(number, Kind.FLOAT32)
boolean = partial(number, Kind.BOOL)
