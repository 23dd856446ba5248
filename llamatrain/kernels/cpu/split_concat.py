"""Splits and joins columns of matrices: rows are copied from one pitch to another, and rounded if asked."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from llamatrain.compiler.declare import Call, KernelEntry, f32, inline, u16
from llamatrain.compiler.vectors import LANES, load_until, store_until
from llamatrain.kernels.cpu.chunking import choose_block, should_stream
from llamatrain.kernels.cpu.registry import Array, kernel

LINE_COLUMNS = 32  # columns of whole cache lines in both precisions


class ColumnCopy(NamedTuple):
    """Columns of an array: the first of them, the elements between rows, and whether they are bf16."""

    memory: Any
    start: int
    pitch: int
    half: int


@inline
def row_address(columns, row):
    """Return the address of a row."""
    return columns.memory + (row * columns.pitch + columns.start) * (2 if columns.half else 4)


@inline
def copy_row(x, y, count, stream):
    """Copy a row."""
    for i in range(0, count, LANES):
        store_until(y, i, count, load_until(x, i, count), stream)


@KernelEntry
def copy_columns(lo, hi, thread, x: ColumnCopy, y: ColumnCopy, count, stream):
    """Copy the columns of rows lo to hi."""
    for row in range(lo, hi):
        source, to = row_address(x, row), row_address(y, row)
        if x.half:
            copy_row(u16(source), u16(to), count, stream)
        elif y.half:
            copy_row(f32(source), u16(to), count, stream)
        else:
            copy_row(f32(source), f32(to), count, stream)


def copy_calls(
    pairs: Sequence[tuple[ColumnCopy, ColumnCopy]], sizes: Sequence[int], stream: bool
) -> list[Call]:
    """Return the calls that copy pairs of columns."""
    calls = []
    for (x, y), count in zip(pairs, sizes, strict=True):
        rows = y.memory.size // y.pitch
        how = {"count": count, "stream": stream, "items": rows, "block": choose_block(rows, 2 * count)}
        calls.append(copy_columns.call(x, y, **how))
    return calls


def as_columns(array: np.ndarray, start: int = 0) -> ColumnCopy:
    """Return the columns of an array from `start` on."""
    return ColumnCopy(memory=array, start=start, pitch=array.shape[-1], half=int(array.dtype == np.uint16))


def locate_columns(parts: Sequence[np.ndarray]) -> tuple[list[int], list[int], bool]:
    """Return the first column of each part in the whole, its columns, and whether all are whole cache lines."""
    sizes = [part.shape[-1] for part in parts]
    return list(accumulate(sizes[:-1], initial=0)), sizes, all(size % LINE_COLUMNS == 0 for size in sizes)


def _takes_floats(outs: Sequence[Array], ins: Sequence[Array], attrs: dict) -> bool:
    (x,), (y,) = ({array.dtype for array in arrays} for arrays in (ins, outs))
    return x in (np.float32, np.uint16) and y in (x, np.uint16)


@kernel("split_columns", takes=_takes_floats)
def split_columns(outs, ins, attrs, scratch, threads):
    """Return the calls of `split_columns`."""
    (x,), (begin, sizes, whole) = ins, locate_columns(outs)
    stream = whole and all(should_stream(out, x) for out in outs)
    return copy_calls(
        [(as_columns(x, start), as_columns(out)) for out, start in zip(outs, begin, strict=True)],
        sizes,
        stream,
    )


@kernel("join_columns", takes=_takes_floats)
def join_columns(outs, ins, attrs, scratch, threads):
    """Return the calls of `join_columns`."""
    (y,), (begin, sizes, whole) = outs, locate_columns(ins)
    stream = whole and should_stream(y, *ins)
    return copy_calls(
        [(as_columns(part), as_columns(y, start)) for part, start in zip(ins, begin, strict=True)],
        sizes,
        stream,
    )
