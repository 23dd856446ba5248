"""Adapters of llama.cpp's old finetune, called 'ggla' by their first bytes.

u32 magic, version 1, r and alpha; then for each tensor u32 dimensions, length of the name, type, the axes (ggml's order), the
name, zeros up to a multiple of 32, and the data. A is (in, r) here and B (out, r), also those of the embeddings; norms have
pairs, too. The scale is alpha / r for all, whatever a tensor's own rank.
"""

from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np

from llamatrain.adapters.adapter import Adapter, Half, Halves, Pair, check_halves, floats, half_of, turned
from llamatrain.files.cursor import NAME_LIMIT, Cursor, quoted
from llamatrain.files.mapped import MappedFile, map_file, unchanged
from llamatrain.files.types import TYPES, TensorInfo
from llamatrain.model.architectures import find

MAGIC = b"algg"
ALIGNMENT = 32
SUFFIXES: dict[str, Half] = {".loraA": "a", ".loraB": "b"}
READABLE = ("F32", "F16")
ARCHITECTURE = "llama"  # that finetune knew no other


class MappedCursor(Cursor):
    """Over data that is not to be copied with the heads that lie between."""

    def __init__(self, file: MappedFile) -> None:
        super().__init__(file)
        self.data = file

    def reach(self, end: int) -> None: ...


def read(path: Path) -> Adapter:
    file = map_file(path, "an adapter")
    with unchanged([file]):
        return read_adapter(MappedCursor(file))


def listed(path: Path) -> tuple[dict[str, int], list[TensorInfo]]:
    """What such a file says, and its tensors, without a look at their numbers."""
    file = map_file(path, "an adapter")
    with unchanged([file]):
        cursor = MappedCursor(file)
        rank, alpha = read_head(cursor)
        return {"rank": rank, "alpha": alpha}, [info for info, _ in read_tensors(cursor)]


def read_head(cursor: Cursor) -> tuple[int, int]:
    """Rank and alpha."""
    cursor.take(len(MAGIC))
    version, rank, alpha = cursor.u32(), cursor.u32(), cursor.u32()
    if version != 1 or not rank:
        raise cursor.fail(f"version {version}, rank {rank}; version 1 and a rank of 1 or more can be")
    return rank, alpha


def read_tensors(cursor: Cursor) -> Iterator[tuple[TensorInfo, np.ndarray]]:
    while cursor.at < cursor.size:
        cursor.reading = "the head of a tensor"
        yield read_tensor(cursor)


def read_adapter(cursor: Cursor) -> Adapter:
    path, (rank, alpha) = cursor.path, read_head(cursor)
    found, architecture = Halves(), find(ARCHITECTURE)
    for info, raw in read_tensors(cursor):
        weight, half = half_of(found, path, info.name, SUFFIXES)
        found[weight][half] = floats(path, info.name, raw, info.type)
    for name, halves in found.items():
        turn(halves, turned(architecture, name))
    check_halves(path, found, architecture)
    pairs = {name: Pair(each["a"], each["b"], alpha / rank) for name, each in found.items()}
    return Adapter(source=path, alpha=float(alpha), pairs=pairs, architecture=architecture)


def read_tensor(cursor: Cursor) -> tuple[TensorInfo, np.ndarray]:
    axes, length, number = cursor.u32(), cursor.u32(), cursor.u32()
    if not 1 <= axes <= 2 or not 0 < length <= NAME_LIMIT:
        raise cursor.fail(f"{axes} dimensions and a name of {length} bytes; 1 or 2, and 1 to {NAME_LIMIT} can be")
    shape = tuple(cursor.u32() for _ in range(axes))[::-1]
    start = cursor.take(length)
    name = str(cursor.since(start), "utf-8", "surrogateescape")
    cursor.reading = f"tensor {quoted(name)}"
    kind = TYPES.get(number)
    if kind is None or kind.name not in READABLE:
        raise cursor.fail(f"its type is {kind.name if kind else number}; {' and '.join(READABLE)} can be")
    if 0 in shape:
        raise cursor.fail(f"a dimension of 0 in {list(shape)}")
    cursor.take(-cursor.at % ALIGNMENT)
    start = cursor.take(prod(shape) * kind.size)
    raw = np.frombuffer(cursor.data, np.uint8, cursor.at - start, start)
    return TensorInfo(name, kind, shape), raw.reshape(*shape[:-1], -1)


def turn(halves: dict[Half, np.ndarray], embeddings: bool) -> None:
    """To the present form: A is turned, but of the embeddings the parts change places."""
    if embeddings:
        renamed: dict[Half, Half] = {"a": "b", "b": "a"}
        turned = {renamed[half]: factor for half, factor in halves.items()}
        halves.clear()
        halves.update(turned)
    elif "a" in halves:
        halves["a"] = np.ascontiguousarray(halves["a"].T)
