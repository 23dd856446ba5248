"""Attention, forward: a softmax that is corrected as further keys come."""

import math

import numpy as np

from llamatrain.compiler.declare import F32, KernelEntry, f32, i32, inline, inline_source, u16
from llamatrain.compiler.vectors import (
    LANES,
    exp,
    load,
    load_until,
    maximum,
    reduce_max,
    reduce_sum,
    splat,
    store_until,
)
from llamatrain.kernels.cpu import tiles
from llamatrain.kernels.cpu.attention_args import Heads
from llamatrain.kernels.cpu.attention_blocks import (
    ACROSS,
    ALONG,
    ANEW,
    BY_ROWS,
    FEW,
    MORE,
    NOTHING,
    ONE,
    PLAIN,
    RANGES,
    ROW_OF_ROWS,
    SIDE,
    STATE,
    TOGETHER,
    ZERO,
    clear_rows,
    fill_range,
    place_of,
    put,
    query_block,
    scale_row,
    source_of,
    visible,
)
from llamatrain.kernels.cpu.norm import dot
from llamatrain.kernels.cpu.softcap import cap_flat
from llamatrain.kernels.cpu.tiles import multiply, pack_a, pack_b, panel_bytes, panel_tiles, tile_depth


@inline
def top_of(scores, line, count, first, end, whole, scale):
    """The largest visible score; what is not a number is passed over, and shows in the sum."""
    top = splat(NOTHING)
    for j in range(0, count, LANES):
        top = maximum(visible(load(scores, line + j) * scale, j, first, end, whole, NOTHING), top)
    return reduce_max(top)


@inline
def cap_scores(shape, scores, rows, count):
    """Where there is a cap; gives what scores are still to be multiplied with."""
    if shape.cap == 0:
        return np.float32(shape.scale)
    for row in range(rows):
        cap_flat(scores, scores, row * SIDE, row * SIDE + count, shape.scale, shape.cap, 0)
    return ONE


@inline
def soften(mode, scores, to, rows, count, key, state, out, place, pitch, size, scale):
    """Scores to their exponentials, packed; sums, and what is already in out, are corrected where a larger score came."""
    ranges, tops, sums = i32(state), f32(state + RANGES), f32(state + RANGES + ROW_OF_ROWS)
    across = panel_tiles(mode, count)
    filled = across * tile_depth(mode)
    for row in range(rows):
        line, first, end = row * SIDE, ranges[2 * row] - key, min(ranges[2 * row + 1] - key, count)
        whole = first <= 0 and end >= filled
        before = tops[row]
        top = max(before, top_of(scores, line, count, first, end, whole, scale))
        base, so_far = ZERO if top == NOTHING else top, splat(ZERO)
        for j in range(0, filled, LANES):
            e = visible(exp(load(scores, line + j) * scale - base), j, first, end, whole, ZERO)
            put(mode, to, row, j, across, e)
            so_far += e
        if top != before and before != NOTHING:
            fade = exp(before - base)
            sums[row] *= fade
            scale_row(out, place + row * pitch, size, fade)
        tops[row] = top
        sums[row] += reduce_sum(so_far)


@inline
def open_block(shape, starts, lasts, out, state, u, batch, kv):
    """Nothing seen yet. Gives the range of keys."""
    heads, size = shape.heads, shape.size
    head, query, rows = query_block(u, kv, shape.length, heads // shape.groups)
    fill_range(i32(state), i32(starts), i32(lasts), lasts != 0, batch, query, rows, shape)
    for row in range(rows):
        f32(state + RANGES)[row], f32(state + RANGES + ROW_OF_ROWS)[row] = NOTHING, ZERO
    clear_rows(f32(out), place_of(shape, batch, query, head), rows, heads * size, size)
    return i32(state)[2 * SIDE], i32(state)[2 * SIDE + 1]


@inline_source
def open_blocks(shape, q, starts, lasts, out, states, packed_q, first, count, batch, kv):
    """Those of a job, with their queries packed. Gives the range of keys of all of them."""
    low, high = shape.keys, 0
    for u in range(count):
        block_low, block_high = open_block(
            shape, starts, lasts, out, states + u * STATE, first + u, batch, kv
        )
        low, high = min(low, block_low), max(high, block_high)
        if shape.length > FEW:
            head, query, rows = query_block(first + u, kv, shape.length, shape.heads // shape.groups)
            source, pitch = (
                q + place_of(shape, batch, query, head) * (2 if shape.half else 4),
                shape.heads * shape.size,
            )
            to = packed_q + u * panel_bytes(shape.mode, SIDE, shape.size)
            pack_a(shape.mode, to, source, shape.half, ALONG, pitch, rows, shape.size)
    return low, high


@inline_source
def close_block(shape, out, lse, state, u, batch, kv):
    """The sums' logs, and out divided by the sums."""
    head, query, rows = query_block(u, kv, shape.length, shape.heads // shape.groups)
    tops, sums = f32(state + RANGES), f32(state + RANGES + ROW_OF_ROWS)
    for row in range(rows):
        line = (batch * shape.heads + head) * shape.length + query + row
        if sums[row] == ZERO:
            lse[line] = NOTHING
        else:
            lse[line] = tops[row] + math.log(sums[row])
            scale_row(f32(out), place_of(shape, batch, query + row, head), shape.size, ONE / sums[row])


@inline
def direct_scores(scores, q, place, pitch, rows, k, source, apart, across, size):
    """As a product would make them, but of keys as they lie."""
    for row in range(rows):
        for j in range(across):
            scores[row * SIDE + j] = dot(q, place + row * pitch, k, source + j * apart, size)


@inline
def add_values(out, place, pitch, rows, v, source, apart, across, size, weights):
    """out += p v, with p as it was packed: fewer than 16 rows of float32."""
    for row in range(rows):
        start, line = place + row * pitch, row * 16
        for i in range(0, size, LANES):
            even, odd = load_until(out, start + i, start + size), splat(ZERO)
            for j in range(0, across, 2):
                at, after = source + j * apart, source + min(j + 1, across - 1) * apart
                weight = line + j // 16 * 256 + j % 16  # beyond the last key it is 0
                even += load_until(v, at + i, at + size) * weights[weight]
                odd += load_until(v, after + i, after + size) * weights[weight + 1]
            store_until(out, start + i, start + size, even + odd, 0)


@inline_source
def attend_directly(shape, q, k, v, out, scores, packed_p, state, place, rows, key, source, across):
    size, pitch, apart = shape.size, shape.heads * shape.size, shape.groups * shape.size
    if shape.half:
        direct_scores(f32(scores), u16(q), place, pitch, rows, u16(k), source, apart, across, size)
    else:
        direct_scores(f32(scores), f32(q), place, pitch, rows, f32(k), source, apart, across, size)
    scale = cap_scores(shape, f32(scores), rows, across)
    soften(PLAIN, f32(scores), packed_p, rows, across, key, state, f32(out), place, pitch, size, scale)
    if shape.half:
        add_values(f32(out), place, pitch, rows, u16(v), source, apart, across, size, f32(packed_p))
    else:
        add_values(f32(out), place, pitch, rows, f32(v), source, apart, across, size, f32(packed_p))


@KernelEntry
def attend(lo, hi, thread, q, k, v, starts, lasts, out, lse: F32, scratch, thread_bytes, shape: Heads):
    """A job: up to TOGETHER blocks of queries that read one head of keys."""
    length, keys, groups, size, mode, half = (
        shape.length,
        shape.keys,
        shape.groups,
        shape.size,
        shape.mode,
        shape.half,
    )
    group, wide, pitch, apart, few = (
        shape.heads // groups,
        2 if half else 4,
        shape.heads * size,
        groups * size,
        length <= FEW,
    )
    blocks = (length + SIDE - 1) // SIDE * group
    jobs = (blocks + TOGETHER - 1) // TOGETHER
    panel, panel_across = panel_bytes(mode, SIDE, size), panel_bytes(mode, size, SIDE)
    packed_q = scratch + thread * thread_bytes
    packed_k, packed_v = packed_q + TOGETHER * panel, packed_q + (TOGETHER + 1) * panel
    packed_p = packed_v + panel_across
    scores = packed_p + panel_bytes(mode, SIDE, SIDE)
    states = scores + 4 * SIDE * SIDE
    tiles.begin(mode)
    for item in range(lo, hi):
        first, batch, kv = item % jobs * TOGETHER, item // jobs // groups, item // jobs % groups
        count = min(TOGETHER, blocks - first)
        low, high = open_blocks(shape, q, starts, lasts, out, states, packed_q, first, count, batch, kv)
        for key in range(low // SIDE * SIDE, high, SIDE):
            across, source = min(SIDE, keys - key), source_of(shape, batch, key, kv)
            if not few:
                pack_b(mode, packed_k, k + source * wide, half, ALONG, apart, across, size)
                pack_b(mode, packed_v, v + source * wide, half, ACROSS, apart, size, across)
            for u in range(count):
                state = states + u * STATE
                head, query, rows = query_block(first + u, kv, length, group)
                place = place_of(shape, batch, query, head)
                if i32(state)[2 * SIDE] >= key + across or i32(state)[2 * SIDE + 1] <= key:
                    continue
                if few:
                    attend_directly(
                        shape, q, k, v, out, scores, packed_p, state, place, rows, key, source, across
                    )
                else:
                    multiply(
                        mode, scores, SIDE, packed_q + u * panel, packed_k, rows, across, size, ANEW, BY_ROWS
                    )
                    scale = cap_scores(shape, f32(scores), rows, across)
                    soften(
                        mode,
                        f32(scores),
                        packed_p,
                        rows,
                        across,
                        key,
                        state,
                        f32(out),
                        place,
                        pitch,
                        size,
                        scale,
                    )
                    multiply(
                        mode, out + 4 * place, pitch, packed_p, packed_v, rows, size, across, MORE, BY_ROWS
                    )
        for u in range(count):
            close_block(shape, out, lse, states + u * STATE, first + u, batch, kv)
    tiles.end(mode)
