"""Reads adapters of llama.cpp's old finetune, whose magic is 'ggla'.

u32 magic, version 1, r and alpha; then the tensors (gguf/legacy_tensors.py). A is (in, r) here and B (out,
r), also those of the embeddings; norms have pairs too. The scale is alpha / r for all, whatever a tensor's
own rank.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from llamatrain.adapters.adapter import (
    Adapter,
    Half,
    Halves,
    LoraPair,
    check_halves,
    decode_factor,
    is_transposed,
    parse_factor_name,
)
from llamatrain.gguf.parser import Cursor
from llamatrain.gguf.reader import FileTensor
from llamatrain.io.mapped_file import map_file, verify_unchanged
from llamatrain.legacy.tensor_records import MappedCursor, read_record
from llamatrain.model.architectures import find_architecture

MAGIC = b"algg"
SUFFIXES: dict[str, Half] = {".loraA": "a", ".loraB": "b"}
ARCHITECTURE = "llama"  # the only one of that finetune


def read_legacy_bin(path: Path) -> Adapter:
    """Read an adapter."""
    file = map_file(path, "an adapter")
    with verify_unchanged([file]):
        return read_adapter(MappedCursor(file))


def list_tensors(path: Path) -> tuple[dict[str, int], list[FileTensor]]:
    """Return the header and the tensors, without decoding them."""
    file = map_file(path, "an adapter")
    with verify_unchanged([file]):
        cursor = MappedCursor(file)
        rank, alpha = read_head(cursor)
        return {"rank": rank, "alpha": alpha}, list(read_tensors(cursor))


def read_head(cursor: Cursor) -> tuple[int, int]:
    """Return rank and alpha."""
    cursor.advance(len(MAGIC))
    version, rank, alpha = cursor.read_u32(), cursor.read_u32(), cursor.read_u32()
    if version != 1 or not rank:
        raise cursor.error(f"version {version}, rank {rank}; version 1 and a rank of 1 or more can be")
    return rank, alpha


def read_tensors(cursor: Cursor) -> Iterator[FileTensor]:
    """Yield all tensors."""
    while cursor.offset < cursor.size:
        yield read_record(cursor)


def read_adapter(cursor: Cursor) -> Adapter:
    """Read the adapter from an open file."""
    path, (rank, alpha) = cursor.path, read_head(cursor)
    halves_by_name, architecture = Halves(), find_architecture(ARCHITECTURE)
    for tensor in read_tensors(cursor):
        weight, half = parse_factor_name(halves_by_name, path, tensor.name, SUFFIXES)
        halves_by_name[weight][half] = decode_factor(path, tensor.name, tensor.raw, tensor.type)
    for name, halves in halves_by_name.items():
        transpose_halves(halves, is_transposed(architecture, name))
    check_halves(path, halves_by_name, architecture)
    pairs = {
        name: LoraPair(factors["a"], factors["b"], alpha / rank) for name, factors in halves_by_name.items()
    }
    return Adapter(source=path, alpha=float(alpha), pairs=pairs, architecture=architecture)


def transpose_halves(halves: dict[Half, np.ndarray], embeddings: bool) -> None:
    """Convert factors to the present layout: transpose A, but for the embeddings swap the factors."""
    if embeddings:
        renamed: dict[Half, Half] = {"a": "b", "b": "a"}
        swapped = {renamed[half]: factor for half, factor in halves.items()}
        halves.clear()
        halves.update(swapped)
    elif "a" in halves:
        halves["a"] = np.ascontiguousarray(halves["a"].T)
