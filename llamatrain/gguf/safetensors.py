"""Reads and writes Hugging Face's safetensors: a length (u64), a JSON header of that length, and the data.

The JSON has dtype, shape and data offsets of each tensor. Files are untrusted: everything is checked against
the file's size before it is used.

The library `safetensors` is not used: NumPy has no type for the BF16 that it returns, it silently takes one
of two equal keys, and a header of 47 MB that names 700,000 empty tensors takes it 25 s and 420 MB, where this
refuses it at once.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from llamatrain.errors import FileError
from llamatrain.gguf.parser import quote
from llamatrain.gguf.types import GgmlType, type_by_name
from llamatrain.gguf.values import LENGTH
from llamatrain.io.atomic_write import AtomicFile
from llamatrain.io.mapped_file import MappedFile, map_file, verify_unchanged

MAX_HEADER = 1 << 22  # bytes of JSON: adapters of the largest models have a tenth of that
KINDS = {"F32": type_by_name("F32"), "F16": type_by_name("F16"), "BF16": type_by_name("BF16")}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file."""

    dtype: str
    shape: tuple[int, ...]
    raw: np.ndarray  # bytes

    @property
    def kind(self) -> GgmlType | None:
        """The GGML type, or None for types that adapters do not have."""
        return KINDS.get(self.dtype)


def open_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name."""
    file = map_file(path, "a file of safetensors")
    with verify_unchanged([file]):
        header, start = read_header(file)
    data = np.frombuffer(file, np.uint8)[start:]
    header.pop("__metadata__", None)
    entries, ranges = {}, []
    for name, entry in header.items():
        entries[name], lo, hi = read_entry(path, name, entry, data)
        ranges.append((lo, hi, name))
    end = 0
    for lo, hi, name in sorted(ranges):
        if lo < end:
            raise FileError(
                f"{path}: {quote(name)} begins at byte {lo} of the data, inside another tensor",
                code="tensors-overlap",
            )
        end = hi
    return entries


def read_header(file: MappedFile) -> tuple[dict[str, Any], int]:
    """Return the header, and the offset of the data."""
    length = LENGTH.unpack_from(file)[0] if len(file) >= LENGTH.size else 0
    if not 0 < length <= min(MAX_HEADER, len(file) - LENGTH.size):
        raise FileError(
            f"{file.path}: not a safetensors file: its header must be at most {MAX_HEADER} "
            f"bytes (got {length}, in a file of {len(file)})",
            code="not-safetensors",
        )
    return read_json(file.path, file.read_bytes(LENGTH.size, length)), LENGTH.size + length


def read_json(path: Path, raw: bytes) -> dict[str, Any]:
    """Return a JSON object without duplicate keys."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Raise if a key occurs twice."""
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a key is there twice")
        return result

    try:
        value = json.loads(raw.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise FileError(
            f"{path}: its JSON cannot be read: {quote(str(error))}", code="invalid-json"
        ) from None
    if not isinstance(value, dict):
        raise FileError(f"{path}: its JSON must be an object", code="invalid-json")
    return value


def read_entry(path: Path, name: str, entry: Any, data: np.ndarray) -> tuple[StoredTensor, int, int]:
    """Return a tensor, and the range of its data."""
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not (isinstance(dtype, str) and is_count_list(shape) and is_count_list(offsets) and len(offsets) == 2):
        raise FileError(
            f"{path}: {quote(name)} needs a dtype, a shape of integers, and two data_offsets",
            code="invalid-tensor-entry",
        )
    lo, hi = offsets
    if not lo <= hi <= len(data):
        raise FileError(
            f"{path}: {quote(name)} is at bytes {lo} to {hi} of only {len(data)} bytes of data",
            code="invalid-tensor-entry",
        )
    kind = KINDS.get(dtype)
    if kind and hi - lo != prod(shape) * kind.block_bytes:
        raise FileError(
            f"{path}: {quote(name)} with {dtype} {shape} cannot have {hi - lo} bytes",
            code="invalid-tensor-entry",
        )
    return StoredTensor(dtype, tuple(shape), data[lo:hi]), lo, hi


def is_count_list(value: Any) -> bool:
    """Return True for a short list of sizes."""
    return (
        isinstance(value, list)
        and len(value) <= 8
        and all(type(count) is int and 0 <= count < 1 << 62 for count in value)
    )


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write float32 tensors atomically."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with AtomicFile(path) as file:
        file.write(LENGTH.pack(len(raw)) + raw)
        for array in tensors.values():
            file.write(array.astype("<f4", copy=False))
