"""Rotation of pairs by the angle of a token's position, and back.

A pair is (x[2i], x[2i+1]), or has one number from each half of the vector.
"""

import numpy as np

from llamatrain.compiler.declare import F32, I32, KernelEntry, Real, inline
from llamatrain.compiler.vectors import (
    LANES,
    duplicate_even,
    duplicate_odd,
    load_until,
    negate_even,
    splat,
    store_until,
    swap_pairs,
)
from llamatrain.kernels.cpu.chunking import choose_block, should_stream
from llamatrain.kernels.cpu.registry import kernel


@inline
def rotate_pairs(v, angle, sign):
    """Rotate neighboring pairs of a vector."""
    return v * duplicate_even(angle) + swap_pairs(v) * negate_even(duplicate_odd(angle) * sign)


@KernelEntry
def rotate(
    lo,
    hi,
    thread,
    x: F32,
    positions: I32,
    table: F32,
    y: F32,
    heads,
    size,
    rotated_size,
    sign: Real,
    stream,
    count,
):
    """Rotate tokens lo to hi: `rotated_size` elements of each head rotate, the rest is copied."""
    way = np.float32(sign)
    for token in range(lo, hi):
        is_valid = (
            0 <= positions[token] < count
        )  # otherwise NaN, visible in the loss; nothing is read out of bounds
        angles = positions[token] * rotated_size if is_valid else 0
        for head in range(heads):
            start = (token * heads + head) * size
            end = start + rotated_size
            for i in range(0, rotated_size, LANES):
                v, angle = load_until(x, start + i, end), load_until(table, angles + i, angles + rotated_size)
                store_until(
                    y,
                    start + i,
                    end,
                    rotate_pairs(v, angle, way) if is_valid else splat(np.float32(np.nan)),
                    stream,
                )
            for i in range(end, start + size, LANES):
                store_until(y, i, start + size, load_until(x, i, start + size), 0)


@KernelEntry
def rotate_halves(
    lo,
    hi,
    thread,
    x: F32,
    positions: I32,
    table: F32,
    y: F32,
    heads,
    size,
    rotated_size,
    sign: Real,
    stream,
    count,
):
    """Rotate tokens lo to hi, where pairs are half of `rotated_size` apart and cosines come before sines."""
    way, pairs = np.float32(sign), rotated_size // 2
    for token in range(lo, hi):
        is_valid = 0 <= positions[token] < count
        cosines = positions[token] * rotated_size if is_valid else 0
        sines = cosines + pairs
        for head in range(heads):
            start = (token * heads + head) * size
            middle, end = start + pairs, start + rotated_size
            for i in range(0, pairs, LANES):
                one, other = load_until(x, start + i, middle), load_until(x, middle + i, end)
                cos = load_until(table, cosines + i, sines)
                sin = load_until(table, sines + i, sines + pairs) * way
                store_until(
                    y,
                    start + i,
                    middle,
                    one * cos - other * sin if is_valid else splat(np.float32(np.nan)),
                    stream,
                )
                store_until(
                    y,
                    middle + i,
                    end,
                    one * sin + other * cos if is_valid else splat(np.float32(np.nan)),
                    stream,
                )
            for i in range(end, start + size, LANES):
                store_until(y, i, start + size, load_until(x, i, start + size), 0)


def rope_calls(outs, ins, attrs, sign):
    """Return the call that rotates heads."""
    (y,), (x, positions, table) = outs, ins
    batch, length, heads, size = x.shape
    rotated_size, halves = table.shape[1] * table.shape[2], attrs.get("halves", False)
    stream = rotated_size == size and should_stream(y[..., : size // 2] if halves else y, x)
    shape = {"heads": heads, "size": size, "rotated_size": rotated_size, "count": len(table)}
    how = {"items": batch * length, "block": choose_block(batch * length, 4 * heads * size)}
    return [
        (rotate_halves if halves else rotate).call(
            x, positions, table, y, **shape, sign=sign, stream=stream, **how
        )
    ]


@kernel("rope")
def rope(outs, ins, attrs, scratch, threads):
    """Return the calls of `rope`."""
    return rope_calls(outs, ins, attrs, 1.0)


@kernel("rope_back")
def rope_back(outs, ins, attrs, scratch, threads):
    """Return the calls of `rope_back`."""
    return rope_calls(outs, ins, attrs, -1.0)
