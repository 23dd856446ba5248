"""Rotation of neighbouring pairs (x[2i], x[2i+1]), or of those in two halves, by the angle of a token's position, and back."""

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
from llamatrain.kernels.cpu.chunking import portion, streams
from llamatrain.kernels.cpu.registry import kernel


@inline
def turn(v, angle, way):
    return v * duplicate_even(angle) + swap_pairs(v) * negate_even(duplicate_odd(angle) * way)


@KernelEntry
def rotate(
    lo, hi, thread, x: F32, positions: I32, table: F32, y: F32, heads, size, turned, sign: Real, past, count
):
    """Tokens lo to hi; `turned` elements of each head turn, the rest pass through."""
    way = np.float32(sign)
    for token in range(lo, hi):
        there = 0 <= positions[token] < count  # else it shows in the loss, and reads no foreign memory
        angles = positions[token] * turned if there else 0
        for head in range(heads):
            start = (token * heads + head) * size
            end = start + turned
            for i in range(0, turned, LANES):
                v, angle = load_until(x, start + i, end), load_until(table, angles + i, angles + turned)
                store_until(
                    y, start + i, end, turn(v, angle, way) if there else splat(np.float32(np.nan)), past
                )
            for i in range(end, start + size, LANES):
                store_until(y, i, start + size, load_until(x, i, start + size), 0)


@KernelEntry
def rotate_halves(
    lo, hi, thread, x: F32, positions: I32, table: F32, y: F32, heads, size, turned, sign: Real, past, count
):
    """The same where pairs lie half of `turned` apart, and a position's cosines before its sines."""
    way, pairs = np.float32(sign), turned // 2
    for token in range(lo, hi):
        there = 0 <= positions[token] < count
        cosines = positions[token] * turned if there else 0
        sines = cosines + pairs
        for head in range(heads):
            start = (token * heads + head) * size
            middle, end = start + pairs, start + turned
            for i in range(0, pairs, LANES):
                one, other = load_until(x, start + i, middle), load_until(x, middle + i, end)
                cos, sin = (
                    load_until(table, cosines + i, sines),
                    load_until(table, sines + i, sines + pairs) * way,
                )
                store_until(
                    y,
                    start + i,
                    middle,
                    one * cos - other * sin if there else splat(np.float32(np.nan)),
                    past,
                )
                store_until(
                    y, middle + i, end, one * sin + other * cos if there else splat(np.float32(np.nan)), past
                )
            for i in range(end, start + size, LANES):
                store_until(y, i, start + size, load_until(x, i, start + size), 0)


def rope(outs, ins, attrs, sign):
    (y,), (x, positions, table) = outs, ins
    batch, length, heads, size = x.shape
    turned, halves = table.shape[1] * table.shape[2], attrs.get("halves", False)
    past = turned == size and streams(y[..., : size // 2] if halves else y, x)
    shape = {"heads": heads, "size": size, "turned": turned, "count": len(table)}
    how = {"items": batch * length, "block": portion(batch * length, 4 * heads * size)}
    return [
        (rotate_halves if halves else rotate).call(
            x, positions, table, y, **shape, sign=sign, past=past, **how
        )
    ]


@kernel("rope")
def rope_forth(outs, ins, attrs, scratch, threads):
    return rope(outs, ins, attrs, 1.0)


@kernel("rope_back")
def rope_back(outs, ins, attrs, scratch, threads):
    return rope(outs, ins, attrs, -1.0)
