"""Attention, forward: a softmax that is rescaled as more keys come."""

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
    ACCUMULATE,
    ACROSS,
    ALONG,
    BY_ROWS,
    FEW_QUERIES,
    FLOAT32_MODE,
    MINUS_INF,
    ONE,
    OVERWRITE,
    QUERY_BYTES,
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
    scale_row,
    store_packed,
)
from llamatrain.kernels.cpu.norm import dot
from llamatrain.kernels.cpu.softcap import cap_flat
from llamatrain.kernels.cpu.tiles import multiply, pack_a, pack_b, panel_bytes, panel_tiles, tile_depth


@inline
def row_max(scores, line, count, first, end, whole, scale):
    """Return the largest visible score. NaN is skipped and appears in the sum."""
    top = splat(MINUS_INF)
    for j in range(0, count, LANES):
        top = maximum(mask_keys(load(scores, line + j) * scale, j, first, end, whole, MINUS_INF), top)
    return reduce_max(top)


@inline
def apply_cap(shape, scores, rows, count):
    """Cap scores, if there is a cap; return the factor that they still need."""
    if shape.cap == 0:
        return np.float32(shape.scale)
    for row in range(rows):
        cap_flat(scores, scores, row * SIDE, row * SIDE + count, shape.scale, shape.cap, 0)
    return ONE


@inline
def online_softmax(mode, scores, to, rows, count, key, state, out, place, pitch, size, scale):
    """Convert scores to packed exponentials; rescale sums and output if a larger score came."""
    ranges, maxima, sums = i32(state), f32(state + RANGE_BYTES), f32(state + RANGE_BYTES + QUERY_BYTES)
    across = panel_tiles(mode, count)
    filled = across * tile_depth(mode)
    for row in range(rows):
        line, first, end = row * SIDE, ranges[2 * row] - key, min(ranges[2 * row + 1] - key, count)
        whole = first <= 0 and end >= filled
        old_max = maxima[row]
        new_max = max(old_max, row_max(scores, line, count, first, end, whole, scale))
        base, row_sum = ZERO if new_max == MINUS_INF else new_max, splat(ZERO)
        for j in range(0, filled, LANES):
            e = mask_keys(exp(load(scores, line + j) * scale - base), j, first, end, whole, ZERO)
            store_packed(mode, to, row, j, across, e)
            row_sum += e
        if new_max != old_max and old_max != MINUS_INF:
            rescale = exp(old_max - base)
            sums[row] *= rescale
            scale_row(out, place + row * pitch, size, rescale)
        maxima[row] = new_max
        sums[row] += reduce_sum(row_sum)


@inline
def init_block(shape, starts, lasts, out, state, u, batch, kv):
    """Initialize the state of a block of queries and return the range of its keys."""
    heads, size = shape.heads, shape.size
    head, query, rows = query_block(u, kv, shape.length, heads // shape.groups)
    fill_key_ranges(i32(state), i32(starts), i32(lasts), lasts != 0, batch, query, rows, shape)
    for row in range(rows):
        f32(state + RANGE_BYTES)[row], f32(state + RANGE_BYTES + QUERY_BYTES)[row] = MINUS_INF, ZERO
    clear_rows(f32(out), query_offset(shape, batch, query, head), rows, heads * size, size)
    return i32(state)[2 * SIDE], i32(state)[2 * SIDE + 1]


@inline_source
def init_blocks(shape, q, starts, lasts, out, states, packed_q, first, count, batch, kv):
    """Initialize the blocks of a job, pack their queries, and return the range of keys of all."""
    low, high = shape.keys, 0
    for u in range(count):
        block_low, block_high = init_block(
            shape, starts, lasts, out, states + u * STATE_BYTES, first + u, batch, kv
        )
        low, high = min(low, block_low), max(high, block_high)
        if shape.length > FEW_QUERIES:
            head, query, rows = query_block(first + u, kv, shape.length, shape.heads // shape.groups)
            source = q + query_offset(shape, batch, query, head) * (2 if shape.half else 4)
            pitch = shape.heads * shape.size
            to = packed_q + u * panel_bytes(shape.mode, SIDE, shape.size)
            pack_a(shape.mode, to, source, shape.half, ALONG, pitch, rows, shape.size)
    return low, high


@inline_source
def finish_block(shape, out, lse, state, u, batch, kv):
    """Store the logs of the sums, and divide the output by the sums."""
    head, query, rows = query_block(u, kv, shape.length, shape.heads // shape.groups)
    maxima, sums = f32(state + RANGE_BYTES), f32(state + RANGE_BYTES + QUERY_BYTES)
    for row in range(rows):
        line = (batch * shape.heads + head) * shape.length + query + row
        if sums[row] == ZERO:
            lse[line] = MINUS_INF
        else:
            lse[line] = maxima[row] + math.log(sums[row])
            scale_row(f32(out), query_offset(shape, batch, query + row, head), shape.size, ONE / sums[row])


@inline
def direct_scores(scores, q, place, pitch, rows, k, source, key_stride, across, size):
    """Compute scores like a product would, but of unpacked keys."""
    for row in range(rows):
        for j in range(across):
            scores[row * SIDE + j] = dot(q, place + row * pitch, k, source + j * key_stride, size)


@inline
def add_values(out, place, pitch, rows, v, source, key_stride, across, size, weights):
    """Add p v to the output, with p packed: fewer than 16 rows of float32."""
    for row in range(rows):
        start, line = place + row * pitch, row * 16
        for i in range(0, size, LANES):
            even, odd = load_until(out, start + i, start + size), splat(ZERO)
            for j in range(0, across, 2):
                at, after = source + j * key_stride, source + min(j + 1, across - 1) * key_stride
                weight = line + j // 16 * 256 + j % 16  # 0 behind the last key
                even += load_until(v, at + i, at + size) * weights[weight]
                odd += load_until(v, after + i, after + size) * weights[weight + 1]
            store_until(out, start + i, start + size, even + odd, 0)


@inline_source
def attend_directly(shape, q, k, v, out, scores, packed_p, state, place, rows, key, source, across):
    """Process a block of few queries without packing keys and values."""
    size, pitch, key_stride = shape.size, shape.heads * shape.size, shape.groups * shape.size
    if shape.half:
        direct_scores(f32(scores), u16(q), place, pitch, rows, u16(k), source, key_stride, across, size)
    else:
        direct_scores(f32(scores), f32(q), place, pitch, rows, f32(k), source, key_stride, across, size)
    scale = apply_cap(shape, f32(scores), rows, across)
    online_softmax(
        FLOAT32_MODE, f32(scores), packed_p, rows, across, key, state, f32(out), place, pitch, size, scale
    )
    if shape.half:
        add_values(f32(out), place, pitch, rows, u16(v), source, key_stride, across, size, f32(packed_p))
    else:
        add_values(f32(out), place, pitch, rows, f32(v), source, key_stride, across, size, f32(packed_p))


@inline_source
def attend_packed(
    shape, packed_q, packed_k, packed_v, out, scores, packed_p, state, place, rows, key, across
):
    """Process a block of queries, keys and values that are packed."""
    mode = shape.mode
    size = shape.size
    pitch = shape.heads * size
    multiply(mode, scores, SIDE, packed_q, packed_k, rows, across, size, OVERWRITE, BY_ROWS)
    scale = apply_cap(shape, f32(scores), rows, across)
    online_softmax(mode, f32(scores), packed_p, rows, across, key, state, f32(out), place, pitch, size, scale)
    multiply(mode, out + 4 * place, pitch, packed_p, packed_v, rows, size, across, ACCUMULATE, BY_ROWS)


@KernelEntry
def attend(lo, hi, thread, q, k, v, starts, lasts, out, lse: F32, scratch, thread_bytes, shape: Heads):
    """Run jobs: up to SHARED_BLOCKS blocks of queries that read one key/value head."""
    length = shape.length
    keys = shape.keys
    groups = shape.groups
    size = shape.size
    mode = shape.mode
    half = shape.half
    group = shape.heads // groups
    wide = 2 if half else 4
    key_stride = groups * size
    few = length <= FEW_QUERIES
    blocks = (length + SIDE - 1) // SIDE * group
    jobs = (blocks + SHARED_BLOCKS - 1) // SHARED_BLOCKS
    panel, panel_across = panel_bytes(mode, SIDE, size), panel_bytes(mode, size, SIDE)
    packed_q = scratch + thread * thread_bytes
    packed_k, packed_v = packed_q + SHARED_BLOCKS * panel, packed_q + (SHARED_BLOCKS + 1) * panel
    packed_p = packed_v + panel_across
    scores = packed_p + panel_bytes(mode, SIDE, SIDE)
    states = scores + 4 * SIDE * SIDE
    tiles.configure_tiles(mode)
    for item in range(lo, hi):
        first, batch, kv = item % jobs * SHARED_BLOCKS, item // jobs // groups, item // jobs % groups
        count = min(SHARED_BLOCKS, blocks - first)
        low, high = init_blocks(shape, q, starts, lasts, out, states, packed_q, first, count, batch, kv)
        for key in range(low // SIDE * SIDE, high, SIDE):
            across, source = min(SIDE, keys - key), key_offset(shape, batch, key, kv)
            if not few:
                pack_b(mode, packed_k, k + source * wide, half, ALONG, key_stride, across, size)
                pack_b(mode, packed_v, v + source * wide, half, ACROSS, key_stride, size, across)
            for u in range(count):
                state = states + u * STATE_BYTES
                head, query, rows = query_block(first + u, kv, length, group)
                place = query_offset(shape, batch, query, head)
                if i32(state)[2 * SIDE] >= key + across or i32(state)[2 * SIDE + 1] <= key:
                    continue
                if few:
                    attend_directly(
                        shape, q, k, v, out, scores, packed_p, state, place, rows, key, source, across
                    )
                else:
                    left = packed_q + u * panel
                    attend_packed(
                        shape,
                        left,
                        packed_k,
                        packed_v,
                        out,
                        scores,
                        packed_p,
                        state,
                        place,
                        rows,
                        key,
                        across,
                    )
        for u in range(count):
            finish_block(shape, out, lse, states + u * STATE_BYTES, first + u, batch, kv)
    tiles.release_tiles(mode)
