"""Rotation of neighbouring pairs (x[2i], x[2i+1]) by the angle of a token's position, and back."""

import numpy as np

from llamatrain.kernels.cpu.binding import kernel
from llamatrain.kernels.cpu.portions import portion, streams
from llamatrain.machine.entry import F32, I32, Entry, Real, inline
from llamatrain.machine.simd import LANES, alternate, evens, load_to, odds, splat, store_to, swapped


@inline
def turn(v, angle, way):
    return v * evens(angle) + swapped(v) * alternate(odds(angle) * way)


@Entry
def rotate(lo, hi, thread, x: F32, positions: I32, table: F32, y: F32, heads, size, turned, sign: Real, past, count):
    """Tokens lo to hi; `turned` elements of each head turn, the rest pass through."""
    way = np.float32(sign)
    for token in range(lo, hi):
        there = 0 <= positions[token] < count  # else it shows in the loss, and reads no foreign memory
        angles = positions[token] * turned if there else 0
        for head in range(heads):
            start = (token * heads + head) * size
            end = start + turned
            for i in range(0, turned, LANES):
                v, angle = load_to(x, start + i, end), load_to(table, angles + i, angles + turned)
                store_to(y, start + i, end, turn(v, angle, way) if there else splat(np.float32(np.nan)), past)
            for i in range(end, start + size, LANES):
                store_to(y, i, start + size, load_to(x, i, start + size), 0)


def rope(outs, ins, sign):
    (y,), (x, positions, table) = outs, ins
    batch, length, heads, size = x.shape
    turned = 2 * table.shape[1]
    past = turned == size and streams(y, x)
    shape = {"heads": heads, "size": size, "turned": turned, "count": len(table)}
    block = portion(batch * length, 4 * heads * size)
    return [rotate.call(x, positions, table, y, **shape, sign=sign, past=past, items=batch * length, block=block)]


@kernel("rope")
def rope_forth(outs, ins, attrs, scratch, threads):
    return rope(outs, ins, 1.0)


@kernel("rope_back")
def rope_back(outs, ins, attrs, scratch, threads):
    return rope(outs, ins, -1.0)
