"""Blocks of queries and keys: their positions, what their queries see, and operations on rows."""

from typing import Any

import numpy as np

from llamatrain.compiler.declare import f32, inline, u16
from llamatrain.compiler.vectors import LANES, load_until, mask_range, splat, store, store_until
from llamatrain.kernels.cpu import tiles
from llamatrain.kernels.cpu.small_attention_layout import key_range
from llamatrain.kernels.cpu.tiles import PAIRS

SIDE: Any = np.int64(64)  # queries and keys of a block of scores
SHARED_BLOCKS = 4  # blocks of queries (backward: of keys) that share one packing of the other side
FEW_QUERIES = 4  # queries that are not worth packing the keys for
# np.int64, because Numba compiles a helper again for each plain int that is passed to it.
ALONG, ACROSS = np.int64(0), np.int64(1)  # how rows lie in the source (tiles.pack_a)
IN_FLOAT32 = np.int64(0)  # the precision of a source
OVERWRITE, ACCUMULATE = np.int64(0), np.int64(1)  # what a product does with C
BY_ROWS = np.int64(1)  # the order in which a product walks through C
FLOAT32_MODE = np.int64(tiles.FLOAT32)
MINUS_INF, ZERO, ONE = np.float32(-np.inf), np.float32(0), np.float32(1)


@inline
def query_block(u, kv, length, group):
    """Return the head, first query and number of queries of block u that reads a key/value head."""
    blocks = (length + SIDE - 1) // SIDE
    query = u % blocks * SIDE
    return kv * group + u // blocks, query, min(SIDE, length - query)


@inline
def fill_key_ranges(to, starts, lasts, has_lasts, batch, query, rows, shape):
    """Store the range of keys of each query of a block, and after them the range of all."""
    low, high = shape.keys, 0
    for row in range(rows):
        first, end = key_range(
            starts, lasts, has_lasts, batch, query + row, shape.length, shape.keys, shape.window
        )
        to[2 * row], to[2 * row + 1] = first, end
        if first < end:
            low, high = min(low, first), max(high, end)
    to[2 * SIDE], to[2 * SIDE + 1] = low, high


RANGE_BYTES = 8 * int(SIDE) + 64  # bytes of the key ranges of a block
QUERY_BYTES = 4 * int(SIDE)  # bytes of a number for each query
STATE_BYTES = RANGE_BYTES + 2 * QUERY_BYTES


@inline
def scale_row(x, start, size, factor):
    """Multiply a row by a factor."""
    for i in range(start, start + size, LANES):
        store_until(x, i, start + size, load_until(x, i, start + size) * factor, 0)


@inline
def clear_rows(x, start, rows, pitch, size):
    """Set rows to zero."""
    for row in range(rows):
        first = start + row * pitch
        for i in range(first, first + size, LANES):
            store_until(x, i, first + size, splat(ZERO), 0)


@inline
def store_packed(mode, to, row, column, across, values):
    """Store a part of a row in a packed left operand that is `across` tiles wide."""
    if mode >= PAIRS:
        store(
            u16(to), (((row >> 4) * across + (column >> 5)) << 9) + ((row & 15) << 5) + (column & 31), values
        )
    else:
        store(
            f32(to), (((row >> 4) * across + (column >> 4)) << 8) + ((row & 15) << 4) + (column & 15), values
        )


@inline
def mask_keys(values, j, first, end, whole, other):
    """Replace values outside a query's range of keys, unless the whole block is in it."""
    return values if whole else mask_range(values, j, first, end, other)


@inline
def query_offset(shape, batch, query, head):
    """Return the offset of a head of queries."""
    return ((batch * shape.length + query) * shape.heads + head) * shape.size


@inline
def key_offset(shape, batch, key, kv):
    """Return the offset of a head of keys."""
    return ((batch * shape.keys + key) * shape.groups + kv) * shape.size
