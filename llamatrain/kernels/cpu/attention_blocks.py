"""Blocks of queries and keys: which there are, what their queries see, and rows of them."""

from typing import Any

import numpy as np

from llamatrain.compiler.declare import f32, inline, u16
from llamatrain.compiler.vectors import LANES, load_until, mask_range, splat, store, store_until
from llamatrain.kernels.cpu import tiles
from llamatrain.kernels.cpu.small_attention_layout import seen
from llamatrain.kernels.cpu.tiles import PAIRS

SIDE: Any = np.int64(64)  # queries and keys of a block of scores
TOGETHER = 4  # blocks of queries (backward: of keys) that share one packing of the other side
FEW = 4  # queries that are not worth packing the keys for
# Typed: of a plain number Numba makes a type, and compiles what is called with it once more.
ALONG, ACROSS, ANEW, MORE, BY_ROWS, PLAIN = (np.int64(word) for word in (0, 1, 0, 1, 1, tiles.FLOAT32))
NOTHING, ZERO, ONE = np.float32(-np.inf), np.float32(0), np.float32(1)


@inline
def query_block(u, kv, length, group):
    """Head, first query and number of queries of block u of those that read a head of keys."""
    blocks = (length + SIDE - 1) // SIDE
    query = u % blocks * SIDE
    return kv * group + u // blocks, query, min(SIDE, length - query)


@inline
def fill_range(to, starts, lasts, given, batch, query, rows, shape):
    """What each query of a block sees, and after that what any of them sees."""
    low, high = shape.keys, 0
    for row in range(rows):
        first, end = seen(starts, lasts, given, batch, query + row, shape.length, shape.keys, shape.window)
        to[2 * row], to[2 * row + 1] = first, end
        if first < end:
            low, high = min(low, first), max(high, end)
    to[2 * SIDE], to[2 * SIDE + 1] = low, high


RANGES = 8 * int(SIDE) + 64  # bytes of such a table
ROW_OF_ROWS = 4 * int(SIDE)  # bytes of a number for each query
STATE = RANGES + 2 * ROW_OF_ROWS


@inline
def scale_row(x, start, size, factor):
    for i in range(start, start + size, LANES):
        store_until(x, i, start + size, load_until(x, i, start + size) * factor, 0)


@inline
def clear_rows(x, start, rows, pitch, size):
    for row in range(rows):
        first = start + row * pitch
        for i in range(first, first + size, LANES):
            store_until(x, i, first + size, splat(ZERO), 0)


@inline
def put(mode, to, row, column, across, values):
    """A part of a row of a packed left operand, `across` tiles wide."""
    if mode >= PAIRS:
        store(
            u16(to), (((row >> 4) * across + (column >> 5)) << 9) + ((row & 15) << 5) + (column & 31), values
        )
    else:
        store(
            f32(to), (((row >> 4) * across + (column >> 4)) << 8) + ((row & 15) << 4) + (column & 15), values
        )


@inline
def visible(values, j, first, end, whole, other):
    return values if whole else mask_range(values, j, first, end, other)


@inline
def place_of(shape, batch, query, head):
    """Where a head of queries begins."""
    return ((batch * shape.length + query) * shape.heads + head) * shape.size


@inline
def source_of(shape, batch, key, kv):
    """Where a head of keys begins."""
    return ((batch * shape.keys + key) * shape.groups + kv) * shape.size
