"""Attention, backward: scores are recomputed from the log of their sums.

p = exp(scores - lse), dp = dout vᵀ, ds = p (dp - sum of dout out) scale; dq = ds k, dk = dsᵀ q, dv = pᵀ dout
"""

import numpy as np

from llamatrain.compiler.declare import KernelEntry, f32, i32, inline, inline_source, u16
from llamatrain.compiler.vectors import LANES, exp, load, load_until, store, store_until
from llamatrain.kernels.cpu import tiles
from llamatrain.kernels.cpu.attention_args import Forward, Gradients, Heads
from llamatrain.kernels.cpu.attention_blocks import (
    ACCUMULATE,
    ACROSS,
    ALONG,
    BY_ROWS,
    IN_FLOAT32,
    ONE,
    OVERWRITE,
    RANGE_BYTES,
    SHARED_BLOCKS,
    SIDE,
    STATE_BYTES,
    ZERO,
    clear_rows,
    fill_key_ranges,
    key_offset,
    mask_keys,
    query_block,
    query_offset,
    store_packed,
)
from llamatrain.kernels.cpu.norm import dot
from llamatrain.kernels.cpu.softcap import cap_flat, cap_slope
from llamatrain.kernels.cpu.tiles import multiply, pack_a, pack_b, panel_bytes, panel_tiles, tile_depth


@inline
def apply_cap_back(shape, scores, slopes, deltas, rows, count):
    """Cap scores and multiply dp - delta by the cap's slope; return the factor that scores still need."""
    if shape.cap == 0:
        return np.float32(shape.scale)
    inverse = np.float32(1 / shape.cap)
    for row in range(rows):
        first, end, delta = row * SIDE, row * SIDE + count, deltas[row]
        cap_flat(scores, scores, first, end, shape.scale, shape.cap, 0)
        for j in range(first, end, LANES):
            store_until(
                slopes,
                j,
                end,
                (load_until(slopes, j, end) - delta) * cap_slope(load_until(scores, j, end), inverse) + delta,
                0,
            )
    return ONE


@inline
def softmax_back(mode, scores, slopes, to, rows, count, key, state, lse, line, scale, ready):
    """Convert scores to p and dp to ds in place; ds is also packed."""
    ranges, deltas, across = i32(state), f32(state + RANGE_BYTES), panel_tiles(mode, count)
    filled = across * tile_depth(mode)
    for row in range(rows):
        at, first, end = row * SIDE, ranges[2 * row] - key, min(ranges[2 * row + 1] - key, count)
        whole, base, delta = first <= 0 and end >= filled, lse[line + row], deltas[row]
        for j in range(0, filled, LANES):
            p = mask_keys(exp(load(scores, at + j) * ready - base), j, first, end, whole, ZERO)
            ds = mask_keys(p * (load(slopes, at + j) - delta) * scale, j, first, end, whole, ZERO)
            store(scores, at + j, p)
            store(slopes, at + j, ds)
            store_packed(mode, to, row, j, across, ds)


@inline_source
def clear_gradients(shape, gradients, batch, kv):
    """Set the gradients of a key/value head and its queries to zero."""
    size, group = shape.size, shape.heads // shape.groups
    for x in (gradients.dk, gradients.dv):
        clear_rows(f32(x), key_offset(shape, batch, 0, kv), shape.keys, shape.groups * size, size)
    clear_rows(
        f32(gradients.dq),
        query_offset(shape, batch, 0, kv * group),
        shape.length,
        shape.heads * size,
        group * size,
    )


@inline_source
def pack_queries(shape, forward, out_half, to, place, rows, state):
    """Pack q and dout, and compute dout · out of each query.

    Both are packed as a left operand and, transposed, as a right operand.
    """
    mode = shape.mode
    size = shape.size
    half = shape.half
    pitch = shape.heads * shape.size
    deltas = f32(state + RANGE_BYTES)
    panel, panel_across = panel_bytes(mode, SIDE, size), panel_bytes(mode, size, SIDE)
    q, dout, wide = forward.q + place * (2 if half else 4), forward.dout + 4 * place, f32(forward.dout)
    pack_a(mode, to, q, half, ALONG, pitch, rows, size)
    pack_b(mode, to + panel, q, half, ACROSS, pitch, size, rows)
    pack_a(mode, to + panel + panel_across, dout, IN_FLOAT32, ALONG, pitch, rows, size)
    pack_b(mode, to + 2 * panel + panel_across, dout, IN_FLOAT32, ACROSS, pitch, size, rows)
    for row in range(rows):
        line = place + row * pitch
        out_row = (
            dot(wide, line, u16(forward.out), line, size)
            if out_half
            else dot(wide, line, f32(forward.out), line, size)
        )
        deltas[row] = out_row


@inline_source
def pack_keys(shape, forward, to, source, across):
    """Pack k and v as right operands, and k transposed."""
    mode, size, half = shape.mode, shape.size, shape.half
    panel, wide, pitch = panel_bytes(mode, SIDE, size), 2 if half else 4, shape.groups * size
    pack_b(mode, to, forward.k + source * wide, half, ALONG, pitch, across, size)
    pack_b(mode, to + panel, forward.v + source * wide, half, ALONG, pitch, across, size)
    pack_b(mode, to + 2 * panel, forward.k + source * wide, half, ACROSS, pitch, size, across)


@inline_source
def accumulate_block(
    shape, lse, gradients, work, packed_q, packed_k, place, source, line, rows, across, key, state
):
    """Add the gradients of one block of queries and one block of keys."""
    mode = shape.mode
    heads = shape.heads
    groups = shape.groups
    size = shape.size
    scale = np.float32(shape.scale)
    panel = panel_bytes(mode, SIDE, size)
    panel_across = panel_bytes(mode, size, SIDE)
    square = panel_bytes(mode, SIDE, SIDE)
    scores = work
    slopes = work + 4 * SIDE * SIDE
    packed_ds = work + 8 * SIDE * SIDE
    turned = work + 8 * SIDE * SIDE + square
    q_across = packed_q + panel
    dout = packed_q + panel + panel_across
    dout_across = packed_q + 2 * panel + panel_across
    multiply(mode, scores, SIDE, packed_q, packed_k, rows, across, size, OVERWRITE, BY_ROWS)
    multiply(mode, slopes, SIDE, dout, packed_k + panel, rows, across, size, OVERWRITE, BY_ROWS)
    ready = apply_cap_back(shape, f32(scores), f32(slopes), f32(state + RANGE_BYTES), rows, across)
    softmax_back(mode, f32(scores), f32(slopes), packed_ds, rows, across, key, state, lse, line, scale, ready)
    multiply(
        mode,
        gradients.dq + 4 * place,
        heads * size,
        packed_ds,
        packed_k + 2 * panel,
        rows,
        size,
        across,
        ACCUMULATE,
        BY_ROWS,
    )
    pack_a(mode, turned, scores, IN_FLOAT32, ACROSS, SIDE, across, rows)
    multiply(
        mode,
        gradients.dv + 4 * source,
        groups * size,
        turned,
        dout_across,
        across,
        size,
        rows,
        ACCUMULATE,
        BY_ROWS,
    )
    pack_a(mode, turned, slopes, IN_FLOAT32, ACROSS, SIDE, across, rows)
    multiply(
        mode,
        gradients.dk + 4 * source,
        groups * size,
        turned,
        q_across,
        across,
        size,
        rows,
        ACCUMULATE,
        BY_ROWS,
    )


@KernelEntry
def attend_back(
    lo,
    hi,
    thread,
    forward: Forward,
    starts,
    lasts,
    gradients: Gradients,
    scratch,
    thread_bytes,
    shape: Heads,
    out_half,
):
    """Run jobs: one key/value head with all query heads that read it."""
    length = shape.length
    keys = shape.keys
    heads = shape.heads
    groups = shape.groups
    size = shape.size
    mode = shape.mode
    group = heads // groups
    blocks = (length + SIDE - 1) // SIDE * group
    panel, panel_across = panel_bytes(mode, SIDE, size), panel_bytes(mode, size, SIDE)
    packed_q = scratch + thread * thread_bytes
    packed_k, k_bytes = packed_q + 2 * (panel + panel_across), 2 * panel + panel_across
    state = packed_k + SHARED_BLOCKS * k_bytes
    work = state + STATE_BYTES
    tiles.configure_tiles(mode)
    for item in range(lo, hi):
        batch, kv = item // groups, item % groups
        clear_gradients(shape, gradients, batch, kv)
        for first in range(0, keys, SHARED_BLOCKS * SIDE):
            last = min(keys, first + SHARED_BLOCKS * SIDE)
            for key in range(first, last, SIDE):
                source, packed = key_offset(shape, batch, key, kv), packed_k + (key - first) // SIDE * k_bytes
                pack_keys(shape, forward, packed, source, min(SIDE, keys - key))
            for u in range(blocks):
                head, query, rows = query_block(u, kv, length, group)
                place, line = query_offset(shape, batch, query, head), (batch * heads + head) * length + query
                fill_key_ranges(i32(state), i32(starts), i32(lasts), lasts != 0, batch, query, rows, shape)
                low, high = i32(state)[2 * SIDE], min(last, i32(state)[2 * SIDE + 1])
                if low < high and high > first:
                    pack_queries(shape, forward, out_half, packed_q, place, rows, state)
                for key in range(max(first, low // SIDE * SIDE), high, SIDE):
                    source, k = key_offset(shape, batch, key, kv), packed_k + (key - first) // SIDE * k_bytes
                    across = min(SIDE, keys - key)
                    accumulate_block(
                        shape,
                        forward.lse,
                        gradients,
                        work,
                        packed_q,
                        k,
                        place,
                        source,
                        line,
                        rows,
                        across,
                        key,
                        state,
                    )
    tiles.release_tiles(mode)
