"""Attention of small heads over few keys, forward and backward, where packing would cost more than the products.

The lanes of a vector are queries, and the other side is processed number by number: no sums across lanes, and
nothing to transpose but a head of few columns. Backward, scores are computed twice: with queries in the lanes
for dq, with keys in the lanes for dk and dv.
"""

import math

import numpy as np

from llamatrain.compiler.declare import F32, KernelEntry, f32, inline, inline_source
from llamatrain.compiler.vectors import (
    LANES,
    exp,
    load,
    load_until,
    mask_range,
    maximum,
    splat,
    store,
    where_between,
    where_nonzero,
)
from llamatrain.kernels.cpu.attention_args import Forward, Gradients, Heads
from llamatrain.kernels.cpu.registry import items_per_block
from llamatrain.kernels.cpu.small_attention_layout import (
    ScratchLayout,
    add_weighted,
    clear,
    copy_rows,
    dot_products,
    fill_ranges,
    from_lanes,
    keys_seen_by,
    pad_size,
    queries_that_see,
    round_up_to_lanes,
    scratch_layout,
    to_lanes,
)

MAX_HEAD_SIZE = min(8, LANES)  # a row is copied as one vector
MAX_LENGTH = 128
MINUS_INF, LOWEST, ZERO, ONE = (np.float32(x) for x in (-np.inf, np.finfo(np.float32).min, 0, 1))


@inline
def softmax_lanes(scores, firsts, ends, low, high):
    """Convert scores to exponentials; return the maximum and the sum of each lane. NaN appears in the sum."""
    top, sums = splat(MINUS_INF), splat(ZERO)
    for j in range(low, high):
        s = where_between(load(scores, j * LANES), splat(np.float32(j)), firsts, ends, splat(MINUS_INF))
        store(scores, j * LANES, s)
        top = maximum(s, top)
    base = maximum(top, LOWEST)  # finite, even if nothing is visible
    for j in range(low, high):
        e = exp(load(scores, j * LANES) - base)
        store(scores, j * LANES, e)
        sums += e
    return top, sums


@KernelEntry
def attend_small(
    lo, hi, thread, q, k, v, starts, lasts, out: F32, lse: F32, scratch, thread_bytes, shape: Heads
):
    """Run jobs: one key/value head with all query heads that read it."""
    length, keys, heads, groups, size = shape.length, shape.keys, shape.heads, shape.groups, shape.size
    group = heads // groups
    pad = pad_size(size)
    pitch = heads * size
    key_stride = groups * size
    scale = np.float32(shape.scale)
    layout = scratch_layout(scratch + thread * thread_bytes, length, keys)
    scores = layout.scores
    columns = layout.x
    tops_of = layout.y
    sums_of = layout.deltas
    firsts = layout.firsts
    ends = layout.ends
    for item in range(lo, hi):
        batch, kv = item // groups, item % groups
        source = (batch * keys * groups + kv) * size
        copy_rows(layout.k, f32(k), source, key_stride, keys, size, ONE)
        copy_rows(layout.v, f32(v), source, key_stride, keys, size, ONE)
        fill_ranges(firsts, ends, starts, lasts, batch, length, keys, shape.window)
        for head in range(kv * group, (kv + 1) * group):
            place, line = (batch * length * heads + head) * size, (batch * heads + head) * length
            copy_rows(layout.q, f32(q), place, pitch, length, size, scale)
            for query in range(0, length, LANES):
                rows = min(LANES, length - query)
                low, high = keys_seen_by(firsts, ends, query, rows, keys)
                to_lanes(columns, layout.q, query, pad)
                dot_products(scores, columns, layout.k, pad, low, high)
                top, sums = softmax_lanes(scores, load(firsts, query), load(ends, query), low, high)
                clear(columns, pad * LANES)
                add_weighted(columns, 0, scores, layout.v, pad, low, high)
                store(tops_of, 0, top)
                store(sums_of, 0, sums)
                for i in range(rows):
                    lse[line + query + i] = (
                        tops_of[i] + math.log(sums_of[i]) if sums_of[i] != ZERO else MINUS_INF
                    )
                inverse = splat(ONE) / where_nonzero(sums, splat(ONE), sums)
                for d in range(0, pad * LANES, LANES):
                    store(columns, d, load(columns, d) * inverse)
                from_lanes(out, place + query * pitch, pitch, rows, size, columns, 0, ONE)


@inline
def softmax_back_lanes(scores, steps, low, high, firsts, ends, lse, delta):
    """Convert scores to p and dp to ds (without the scale) in place, with queries in the lanes."""
    for j in range(low, high):
        at = splat(np.float32(j))
        p = exp(load(scores, j * LANES) - lse)
        store(
            steps,
            j * LANES,
            where_between(p * (load(steps, j * LANES) - delta), at, firsts, ends, splat(ZERO)),
        )


@inline
def softmax_back_keys(scores, steps, low, high, key, firsts, ends, lse, line, deltas):
    """Convert scores to p and dp to ds in place, with keys in the lanes."""
    for i in range(low, high):
        first, end, at = np.int64(firsts[i]), np.int64(ends[i]), i * LANES
        p = exp(load(scores, at) - lse[line + i])
        store(steps, at, mask_range(p * (load(steps, at) - deltas[i]), key, first, end, ZERO))
        store(scores, at, mask_range(p, key, first, end, ZERO))


@inline
def sum_products(to, i, x, y, pad):
    """Store the sum of products of columns of x and y."""
    so_far = splat(ZERO)
    for d in range(0, pad * LANES, LANES):
        so_far += load(x, d) * load(y, d)
    store(to, i, so_far)


@inline_source
def queries_back(shape, layout, lse, line, dq, place, pad, scale):
    """Compute dq, with queries in the lanes."""
    length, keys, pitch = shape.length, shape.keys, shape.heads * shape.size
    for query in range(0, length, LANES):
        rows = min(LANES, length - query)
        low, high = keys_seen_by(layout.firsts, layout.ends, query, rows, keys)
        to_lanes(layout.x, layout.out, query, pad)
        to_lanes(layout.y, layout.dout, query, pad)
        sum_products(layout.deltas, query, layout.x, layout.y, pad)
        dot_products(layout.steps, layout.y, layout.v, pad, low, high)
        to_lanes(layout.x, layout.q, query, pad)
        dot_products(layout.scores, layout.x, layout.k, pad, low, high)
        of_lanes, delta = load_until(lse, line + query, line + length), load(layout.deltas, query)
        softmax_back_lanes(
            layout.scores,
            layout.steps,
            low,
            high,
            load(layout.firsts, query),
            load(layout.ends, query),
            of_lanes,
            delta,
        )
        clear(layout.x, pad * LANES)
        add_weighted(layout.x, 0, layout.steps, layout.k, pad, low, high)
        from_lanes(dq, place + query * pitch, pitch, rows, shape.size, layout.x, 0, scale)


@inline_source
def keys_back(shape, layout, lse, line, pad):
    """Add a query head's part of dk and dv, with keys in the lanes."""
    for key in range(0, shape.keys, LANES):
        low, high = queries_that_see(layout.firsts, layout.ends, key, shape.length)
        to_lanes(layout.x, layout.k, key, pad)
        dot_products(layout.scores, layout.x, layout.q, pad, low, high)
        to_lanes(layout.x, layout.v, key, pad)
        dot_products(layout.steps, layout.x, layout.dout, pad, low, high)
        softmax_back_keys(
            layout.scores, layout.steps, low, high, key, layout.firsts, layout.ends, lse, line, layout.deltas
        )
        add_weighted(layout.dk, key * pad, layout.steps, layout.q, pad, low, high)
        add_weighted(layout.dv, key * pad, layout.scores, layout.dout, pad, low, high)


@KernelEntry
def attend_small_back(
    lo, hi, thread, forward: Forward, starts, lasts, gradients: Gradients, scratch, thread_bytes, shape: Heads
):
    """Run jobs: one key/value head with all query heads that read it."""
    length, keys, heads, groups, size = shape.length, shape.keys, shape.heads, shape.groups, shape.size
    group = heads // groups
    pad = pad_size(size)
    pitch = heads * size
    key_stride = groups * size
    scale = np.float32(shape.scale)
    layout = scratch_layout(scratch + thread * thread_bytes, length, keys)
    for item in range(lo, hi):
        batch, kv = item // groups, item % groups
        source = (batch * keys * groups + kv) * size
        copy_rows(layout.k, f32(forward.k), source, key_stride, keys, size, ONE)
        copy_rows(layout.v, f32(forward.v), source, key_stride, keys, size, ONE)
        fill_ranges(layout.firsts, layout.ends, starts, lasts, batch, length, keys, shape.window)
        clear(layout.dk, round_up_to_lanes(keys) * pad)
        clear(layout.dv, round_up_to_lanes(keys) * pad)
        for head in range(kv * group, (kv + 1) * group):
            place, line = (batch * length * heads + head) * size, (batch * heads + head) * length
            copy_rows(layout.q, f32(forward.q), place, pitch, length, size, scale)
            copy_rows(layout.dout, f32(forward.dout), place, pitch, length, size, ONE)
            copy_rows(layout.out, f32(forward.out), place, pitch, length, size, ONE)
            queries_back(shape, layout, forward.lse, line, f32(gradients.dq), place, pad, scale)
            keys_back(shape, layout, forward.lse, line, pad)
        for key in range(0, keys, LANES):
            rows = min(LANES, keys - key)
            from_lanes(
                f32(gradients.dk),
                source + key * key_stride,
                key_stride,
                rows,
                size,
                layout.dk,
                key * pad,
                ONE,
            )
            from_lanes(
                f32(gradients.dv),
                source + key * key_stride,
                key_stride,
                rows,
                size,
                layout.dv,
                key * pad,
                ONE,
            )


# ---- binding ------------------------------------------------------------------------------------


def is_small(q, k) -> bool:
    """Return True if heads and rows are small enough."""
    return (
        q.dtype == k.dtype == np.float32
        and q.shape[3] <= MAX_HEAD_SIZE
        and max(q.shape[1], k.shape[1]) <= MAX_LENGTH
    )


def thread_bytes(q, k) -> int:
    """Return the bytes that a thread needs."""
    return (
        len(ScratchLayout._fields) * 4 * LANES * (-(-max(q.shape[1], k.shape[1]) // LANES) * LANES + 1)
    )  # equal to part_bytes, without calling a helper


def choose_job_block(q, k) -> int:
    """Return how many jobs make a block."""
    return items_per_block(q.shape[1] * q.shape[2] // k.shape[2] * k.shape[1] * 4)
