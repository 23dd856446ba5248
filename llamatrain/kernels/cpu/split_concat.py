"""Columns of a matrix cut into parts, and parts joined: rows from one pitch to another, rounded on the way where asked."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from llamatrain.compiler.declare import Call, KernelEntry, f32, inline, u16
from llamatrain.compiler.vectors import LANES, load_until, store_until
from llamatrain.kernels.cpu.chunking import portion, streams
from llamatrain.kernels.cpu.registry import Array, kernel

WHOLE = 32  # columns: of whole lines in either precision


class ColumnCopy(NamedTuple):
    """Some of an array: the first of them, elements from one row to the next, and whether they are bf16."""

    memory: Any
    start: int
    pitch: int
    half: int


@inline
def address(columns, row):
    return columns.memory + (row * columns.pitch + columns.start) * (2 if columns.half else 4)


@inline
def copy_row(x, y, count, past):
    for i in range(0, count, LANES):
        store_until(y, i, count, load_until(x, i, count), past)


@KernelEntry
def copy_columns(lo, hi, thread, x: ColumnCopy, y: ColumnCopy, count, past):
    for row in range(lo, hi):
        source, to = address(x, row), address(y, row)
        if x.half:
            copy_row(u16(source), u16(to), count, past)
        elif y.half:
            copy_row(f32(source), u16(to), count, past)
        else:
            copy_row(f32(source), f32(to), count, past)


def moves(pairs: Sequence[tuple[ColumnCopy, ColumnCopy]], sizes: Sequence[int], past: bool) -> list[Call]:
    made = []
    for (x, y), count in zip(pairs, sizes, strict=True):
        rows = y.memory.size // y.pitch
        how = {"count": count, "past": past, "items": rows, "block": portion(rows, 2 * count)}
        made.append(copy_columns.call(x, y, **how))
    return made


def columns_of(array: np.ndarray, start: int = 0) -> ColumnCopy:
    return ColumnCopy(memory=array, start=start, pitch=array.shape[-1], half=int(array.dtype == np.uint16))


def starts(parts: Sequence[np.ndarray]) -> tuple[list[int], list[int], bool]:
    """Where each begins in the whole, its columns, and whether all are whole lines."""
    sizes = [part.shape[-1] for part in parts]
    return list(accumulate(sizes[:-1], initial=0)), sizes, all(size % WHOLE == 0 for size in sizes)


def _floats(outs: Sequence[Array], ins: Sequence[Array], attrs: dict) -> bool:
    (x,), (y,) = ({array.dtype for array in arrays} for arrays in (ins, outs))
    return x in (np.float32, np.uint16) and y in (x, np.uint16)


@kernel("split_columns", takes=_floats)
def split_columns(outs, ins, attrs, scratch, threads):
    (x,), (begin, sizes, whole) = ins, starts(outs)
    past = whole and all(streams(out, x) for out in outs)
    return moves(
        [(columns_of(x, start), columns_of(out)) for out, start in zip(outs, begin, strict=True)], sizes, past
    )


@kernel("join_columns", takes=_floats)
def join_columns(outs, ins, attrs, scratch, threads):
    (y,), (begin, sizes, whole) = outs, starts(ins)
    past = whole and streams(y, *ins)
    return moves(
        [(columns_of(part), columns_of(y, start)) for part, start in zip(ins, begin, strict=True)],
        sizes,
        past,
    )
