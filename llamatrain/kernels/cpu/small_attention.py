"""Attention of small heads over few keys, forward and back, where packing for matrix products would cost more than they do.

The lanes of a vector are queries, and the other side goes by number for number: no sum across lanes, nothing to transpose but
a head of a few columns. Back, the scores are made twice: with queries in the lanes for dq, with keys in them for dk and dv.
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
from llamatrain.kernels.cpu.registry import share
from llamatrain.kernels.cpu.small_attention_layout import (
    ScratchLayout,
    add_weighted,
    any_sees,
    clear,
    copy_rows,
    fill_ranges,
    from_lanes,
    padded,
    parts,
    products,
    to_lanes,
    who_sees,
    whole,
)

WIDEST, LONGEST = 8, 128  # a head, and the queries or keys, from which on matrix products are faster
NOTHING, LOWEST, ZERO, ONE = (np.float32(x) for x in (-np.inf, np.finfo(np.float32).min, 0, 1))


@inline
def soften(scores, firsts, ends, low, high):
    """Scores to their exponentials. Gives the largest score of each lane (what is not a number shows in the sum), and the sum."""
    top, sums = splat(NOTHING), splat(ZERO)
    for j in range(low, high):
        s = where_between(load(scores, j * LANES), splat(np.float32(j)), firsts, ends, splat(NOTHING))
        store(scores, j * LANES, s)
        top = maximum(s, top)
    base = maximum(top, LOWEST)  # a number, even where nothing is seen
    for j in range(low, high):
        e = exp(load(scores, j * LANES) - base)
        store(scores, j * LANES, e)
        sums += e
    return top, sums


@KernelEntry
def attend_small(
    lo, hi, thread, q, k, v, starts, lasts, out: F32, lse: F32, scratch, thread_bytes, shape: Heads
):
    """A job: one head of keys, with all heads of queries that read it."""
    length, keys, heads, groups, size = shape.length, shape.keys, shape.heads, shape.groups, shape.size
    group, pad, pitch, apart, scale = (
        heads // groups,
        padded(size),
        heads * size,
        groups * size,
        np.float32(shape.scale),
    )
    room = parts(scratch + thread * thread_bytes, length, keys)
    scores, columns, tops_of, sums_of, firsts, ends = (
        room.scores,
        room.x,
        room.y,
        room.deltas,
        room.firsts,
        room.ends,
    )
    for item in range(lo, hi):
        batch, kv = item // groups, item % groups
        source = (batch * keys * groups + kv) * size
        copy_rows(room.k, f32(k), source, apart, keys, size, ONE)
        copy_rows(room.v, f32(v), source, apart, keys, size, ONE)
        fill_ranges(firsts, ends, starts, lasts, batch, length, keys, shape.window)
        for head in range(kv * group, (kv + 1) * group):
            place, line = (batch * length * heads + head) * size, (batch * heads + head) * length
            copy_rows(room.q, f32(q), place, pitch, length, size, scale)
            for query in range(0, length, LANES):
                rows = min(LANES, length - query)
                low, high = any_sees(firsts, ends, query, rows, keys)
                to_lanes(columns, room.q, query, pad)
                products(scores, columns, room.k, pad, low, high)
                top, sums = soften(scores, load(firsts, query), load(ends, query), low, high)
                clear(columns, pad * LANES)
                add_weighted(columns, 0, scores, room.v, pad, low, high)
                store(tops_of, 0, top)
                store(sums_of, 0, sums)
                for i in range(rows):
                    lse[line + query + i] = (
                        tops_of[i] + math.log(sums_of[i]) if sums_of[i] != ZERO else NOTHING
                    )
                inverse = splat(ONE) / where_nonzero(sums, splat(ONE), sums)
                for d in range(0, pad * LANES, LANES):
                    store(columns, d, load(columns, d) * inverse)
                from_lanes(out, place + query * pitch, pitch, rows, size, columns, 0, ONE)


@inline
def slopes(scores, steps, low, high, firsts, ends, lse, delta):
    """Scores to p, dp to ds but for the scale, in place: queries in the lanes."""
    for j in range(low, high):
        at = splat(np.float32(j))
        p = exp(load(scores, j * LANES) - lse)
        store(
            steps,
            j * LANES,
            where_between(p * (load(steps, j * LANES) - delta), at, firsts, ends, splat(ZERO)),
        )


@inline
def slopes_of_keys(scores, steps, low, high, key, firsts, ends, lse, line, deltas):
    """The same with keys in the lanes, and p too."""
    for i in range(low, high):
        first, end, at = np.int64(firsts[i]), np.int64(ends[i]), i * LANES
        p = exp(load(scores, at) - lse[line + i])
        store(steps, at, mask_range(p * (load(steps, at) - deltas[i]), key, first, end, ZERO))
        store(scores, at, mask_range(p, key, first, end, ZERO))


@inline
def sum_products(to, i, x, y, pad):
    so_far = splat(ZERO)
    for d in range(0, pad * LANES, LANES):
        so_far += load(x, d) * load(y, d)
    store(to, i, so_far)


@inline_source
def queries_back(shape, room, lse, line, dq, place, pad, scale):
    """Queries in the lanes: dq."""
    length, keys, pitch = shape.length, shape.keys, shape.heads * shape.size
    for query in range(0, length, LANES):
        rows = min(LANES, length - query)
        low, high = any_sees(room.firsts, room.ends, query, rows, keys)
        to_lanes(room.x, room.out, query, pad)
        to_lanes(room.y, room.dout, query, pad)
        sum_products(room.deltas, query, room.x, room.y, pad)
        products(room.steps, room.y, room.v, pad, low, high)
        to_lanes(room.x, room.q, query, pad)
        products(room.scores, room.x, room.k, pad, low, high)
        of_lanes, delta = load_until(lse, line + query, line + length), load(room.deltas, query)
        slopes(
            room.scores,
            room.steps,
            low,
            high,
            load(room.firsts, query),
            load(room.ends, query),
            of_lanes,
            delta,
        )
        clear(room.x, pad * LANES)
        add_weighted(room.x, 0, room.steps, room.k, pad, low, high)
        from_lanes(dq, place + query * pitch, pitch, rows, shape.size, room.x, 0, scale)


@inline_source
def keys_back(shape, room, lse, line, pad):
    """Keys in the lanes: what a head of queries adds to dk and dv."""
    for key in range(0, shape.keys, LANES):
        low, high = who_sees(room.firsts, room.ends, key, shape.length)
        to_lanes(room.x, room.k, key, pad)
        products(room.scores, room.x, room.q, pad, low, high)
        to_lanes(room.x, room.v, key, pad)
        products(room.steps, room.x, room.dout, pad, low, high)
        slopes_of_keys(
            room.scores, room.steps, low, high, key, room.firsts, room.ends, lse, line, room.deltas
        )
        add_weighted(room.dk, key * pad, room.steps, room.q, pad, low, high)
        add_weighted(room.dv, key * pad, room.scores, room.dout, pad, low, high)


@KernelEntry
def attend_small_back(
    lo, hi, thread, given: Forward, starts, lasts, to: Gradients, scratch, thread_bytes, shape: Heads
):
    """A job: as forward."""
    length, keys, heads, groups, size = shape.length, shape.keys, shape.heads, shape.groups, shape.size
    group, pad, pitch, apart, scale = (
        heads // groups,
        padded(size),
        heads * size,
        groups * size,
        np.float32(shape.scale),
    )
    room = parts(scratch + thread * thread_bytes, length, keys)
    for item in range(lo, hi):
        batch, kv = item // groups, item % groups
        source = (batch * keys * groups + kv) * size
        copy_rows(room.k, f32(given.k), source, apart, keys, size, ONE)
        copy_rows(room.v, f32(given.v), source, apart, keys, size, ONE)
        fill_ranges(room.firsts, room.ends, starts, lasts, batch, length, keys, shape.window)
        clear(room.dk, whole(keys) * pad)
        clear(room.dv, whole(keys) * pad)
        for head in range(kv * group, (kv + 1) * group):
            place, line = (batch * length * heads + head) * size, (batch * heads + head) * length
            copy_rows(room.q, f32(given.q), place, pitch, length, size, scale)
            copy_rows(room.dout, f32(given.dout), place, pitch, length, size, ONE)
            copy_rows(room.out, f32(given.out), place, pitch, length, size, ONE)
            queries_back(shape, room, given.lse, line, f32(to.dq), place, pad, scale)
            keys_back(shape, room, given.lse, line, pad)
        for key in range(0, keys, LANES):
            rows = min(LANES, keys - key)
            from_lanes(f32(to.dk), source + key * apart, apart, rows, size, room.dk, key * pad, ONE)
            from_lanes(f32(to.dv), source + key * apart, apart, rows, size, room.dv, key * pad, ONE)


# ---- binding ------------------------------------------------------------------------------------


def is_small(q, k) -> bool:
    return (
        q.dtype == k.dtype == np.float32 and q.shape[3] <= WIDEST and max(q.shape[1], k.shape[1]) <= LONGEST
    )


def thread_bytes(q, k) -> int:
    return (
        len(ScratchLayout._fields) * 4 * LANES * (-(-max(q.shape[1], k.shape[1]) // LANES) * LANES + 1)
    )  # of so many bytes, uncompiled


def jobs_together(q, k) -> int:
    return share(q.shape[1] * q.shape[2] // k.shape[2] * k.shape[1] * 4)
