"""Data layout of attention of small heads: rows of a head, columns in the lanes of vectors, and key ranges."""

from typing import NamedTuple

import numpy as np

from llamatrain.compiler.declare import F32, f32, i32, inline
from llamatrain.compiler.vectors import LANES, load, load_until, splat, store

ZERO = np.float32(0)


@inline
def key_range(starts, lasts, has_lasts, batch, query, length, keys, window):
    """Return the keys first .. end that a query sees."""
    place = batch * length + query
    last = lasts[place] if has_lasts else query + keys - length
    return max(0, starts[place], last + 1 - window), min(keys, last + 1)


# ---- a head's rows, and its columns in lanes ----------------------------------------------------


@inline
def round_up_to_lanes(count):
    """Round up to whole vectors."""
    return (count + LANES - 1) // LANES * LANES


@inline
def pad_size(size):
    """Round the size of a head up to a multiple of four."""
    return (size + 3) // 4 * 4


@inline
def copy_rows(to, x, start, pitch, rows, size, factor):
    """Copy rows, padded with zeros to a multiple of four columns; the store of a row reaches into the next."""
    for row in range(rows):
        first = start + row * pitch
        store(to, row * pad_size(size), load_until(x, first, first + size) * factor)


@inline
def to_lanes(to, rows, first, pad):
    """Transpose LANES rows to columns; lanes behind the last row are never written out."""
    for lane in range(LANES):
        for d in range(pad):
            to[d * LANES + lane] = rows[(first + lane) * pad + d]


@inline
def from_lanes(x, start, pitch, rows, size, columns, i, factor):
    """Transpose columns back to rows, times a factor."""
    for lane in range(rows):
        for d in range(size):
            x[start + lane * pitch + d] = columns[i + d * LANES + lane] * factor


@inline
def dot_products(to, columns, rows, pad, low, high):
    """Compute the dot products of the lanes with each row."""
    for d in range(0, pad, 4):
        i = d * LANES
        x0 = load(columns, i)
        x1 = load(columns, i + LANES)
        x2 = load(columns, i + 2 * LANES)
        x3 = load(columns, i + 3 * LANES)
        for j in range(low, high):
            at = j * pad + d
            so_far = load(to, j * LANES) if d > 0 else splat(ZERO)
            store(
                to,
                j * LANES,
                so_far + x0 * rows[at] + x1 * rows[at + 1] + x2 * rows[at + 2] + x3 * rows[at + 3],
            )


@inline
def add_weighted(to, start, weights, rows, pad, low, high):
    """Add the rows, each times its weights, to columns."""
    for d in range(0, pad, 4):
        i = start + d * LANES
        x0, x1, x2, x3 = load(to, i), load(to, i + LANES), load(to, i + 2 * LANES), load(to, i + 3 * LANES)
        for j in range(low, high):
            at, weight = j * pad + d, load(weights, j * LANES)
            x0 += weight * rows[at]
            x1 += weight * rows[at + 1]
            x2 += weight * rows[at + 2]
            x3 += weight * rows[at + 3]
        store(to, i, x0)
        store(to, i + LANES, x1)
        store(to, i + 2 * LANES, x2)
        store(to, i + 3 * LANES, x3)


@inline
def clear(x, size):
    """Set elements to zero."""
    for i in range(0, size, LANES):
        store(x, i, splat(ZERO))


@inline
def fill_ranges(firsts, ends, starts, lasts, batch, length, keys, window):
    """Store the range of keys of each query."""
    for query in range(length):
        firsts[query], ends[query] = key_range(
            i32(starts), i32(lasts), lasts != 0, batch, query, length, keys, window
        )


@inline
def keys_seen_by(firsts, ends, query, rows, keys):
    """Return the range of keys that any of these queries sees."""
    low, high = keys, 0
    for i in range(query, query + rows):
        if firsts[i] < ends[i]:
            first, end = int(firsts[i]), int(ends[i])
            low, high = min(low, first), max(high, end)
    return low, high


@inline
def queries_that_see(firsts, ends, key, length):
    """Return the queries from the first to the last that sees any of LANES keys."""
    low, high = length, 0
    for i in range(length):
        if max(firsts[i], np.float32(key)) < min(ends[i], np.float32(key + LANES)):
            low, high = min(low, i), i + 1
    return low, high


# ---- a thread's memory ----------------------------------------------------------------------------


@inline
def part_bytes(length, keys):
    """Return the bytes of an array: a vector for each query or key, and one that stores may reach into."""
    return 4 * LANES * (round_up_to_lanes(max(length, keys)) + 1)


class ScratchLayout(NamedTuple):
    """The arrays in a thread's memory: rows, scores and steps, columns x and y, numbers for each query."""

    k: F32
    v: F32
    q: F32
    dout: F32
    out: F32
    scores: F32
    steps: F32
    dk: F32
    dv: F32
    x: F32
    y: F32
    firsts: F32
    ends: F32
    deltas: F32


@inline
def scratch_layout(at, length, keys):
    """Return the arrays at an address."""
    size = part_bytes(length, keys)
    return ScratchLayout(
        f32(at),
        f32(at + size),
        f32(at + 2 * size),
        f32(at + 3 * size),
        f32(at + 4 * size),
        f32(at + 5 * size),
        f32(at + 6 * size),
        f32(at + 7 * size),
        f32(at + 8 * size),
        f32(at + 9 * size),
        f32(at + 10 * size),
        f32(at + 11 * size),
        f32(at + 12 * size),
        f32(at + 13 * size),
    )
