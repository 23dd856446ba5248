"""Attention of small heads over few keys, forward and back, where packing for matrix products would cost more than they do.

The lanes of a vector are queries, and the other side goes by number for number: no sum across lanes, nothing to transpose but
a head of a few columns. Back, the scores are made twice: with queries in the lanes for dq, with keys in them for dk and dv.
"""

import math

import numpy as np

from llamatrain.kernels.cpu.binding import share
from llamatrain.machine.entry import Entry, f32, i32, real
from llamatrain.machine.jit import inline
from llamatrain.machine.simd.memory import load, load_to, store
from llamatrain.machine.simd.vector import LANES, between, exp, larger, otherwise, splat, within

WIDEST, LONGEST = 8, 128  # a head, and the queries or keys, from which on matrix products are faster
NOTHING, LOWEST, ZERO, ONE = (np.float32(x) for x in (-np.inf, np.finfo(np.float32).min, 0, 1))


@inline
def seen(starts, lasts, given, batch, query, length, keys):
    """The keys first .. end that a query sees."""
    place = batch * length + query
    last = lasts[place] if given else query + keys - length
    return max(0, starts[place]), min(keys, last + 1)


# ---- a head's rows, and its columns in lanes ----------------------------------------------------


@inline
def whole(count):
    return (count + LANES - 1) // LANES * LANES


@inline
def padded(size):
    return (size + 3) // 4 * 4


@inline
def copy_rows(to, x, start, pitch, rows, size, factor):
    """Rows one after the other, zeros to the next multiple of four columns; the store of a row reaches into the next."""
    for row in range(rows):
        first = start + row * pitch
        store(to, row * padded(size), load_to(x, first, first + size) * factor)


@inline
def to_lanes(to, rows, first, pad):
    """Columns of LANES rows; what lies in lanes beyond the last row is never written out."""
    for lane in range(LANES):
        for d in range(pad):
            to[d * LANES + lane] = rows[(first + lane) * pad + d]


@inline
def from_lanes(x, start, pitch, rows, size, columns, i, factor):
    for lane in range(rows):
        for d in range(size):
            x[start + lane * pitch + d] = columns[i + d * LANES + lane] * factor


@inline
def products(to, columns, rows, pad, low, high):
    """Of what is in the lanes with each row."""
    for d in range(0, pad, 4):
        i = d * LANES
        x0, x1, x2, x3 = load(columns, i), load(columns, i + LANES), load(columns, i + 2 * LANES), load(columns, i + 3 * LANES)
        for j in range(low, high):
            at = j * pad + d
            so_far = load(to, j * LANES) if d > 0 else splat(ZERO)
            store(to, j * LANES, so_far + x0 * rows[at] + x1 * rows[at + 1] + x2 * rows[at + 2] + x3 * rows[at + 3])


@inline
def add_weighted(to, start, weights, rows, pad, low, high):
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
    for i in range(0, size, LANES):
        store(x, i, splat(ZERO))


@inline
def fill_ranges(firsts, ends, starts, lasts, batch, length, keys):
    for query in range(length):
        firsts[query], ends[query] = seen(i32(starts), i32(lasts), lasts != 0, batch, query, length, keys)


@inline
def any_sees(firsts, ends, query, rows, keys):
    """What any of these queries sees."""
    low, high = keys, 0
    for i in range(query, query + rows):
        if firsts[i] < ends[i]:
            first, end = int(firsts[i]), int(ends[i])
            low, high = min(low, first), max(high, end)
    return low, high


@inline
def who_sees(firsts, ends, key, length):
    """The queries from the first to the last that sees any of LANES keys."""
    low, high = length, 0
    for i in range(length):
        if max(firsts[i], np.float32(key)) < min(ends[i], np.float32(key + LANES)):
            low, high = min(low, i), i + 1
    return low, high


# ---- forward and back ---------------------------------------------------------------------------

PARTS = 14  # of a thread's memory


@inline
def part_bytes(length, keys):
    """A vector for each query or key, and one more, since a row's store may reach beyond."""
    return 4 * LANES * (whole(max(length, keys)) + 1)


@inline
def parts(space, length, keys):
    size = part_bytes(length, keys)
    few = f32(space), f32(space + size), f32(space + 2 * size), f32(space + 3 * size), f32(space + 4 * size)
    more = f32(space + 5 * size), f32(space + 6 * size), f32(space + 7 * size), f32(space + 8 * size), f32(space + 9 * size)
    return few + more + (f32(space + 10 * size), f32(space + 11 * size), f32(space + 12 * size), f32(space + 13 * size))


@inline
def soften(scores, firsts, ends, low, high):
    """Scores to their exponentials. Gives the largest score of each lane (what is not a number shows in the sum), and the sum."""
    top, sums = splat(NOTHING), splat(ZERO)
    for j in range(low, high):
        s = between(load(scores, j * LANES), splat(np.float32(j)), firsts, ends, splat(NOTHING))
        store(scores, j * LANES, s)
        top = larger(s, top)
    base = larger(top, LOWEST)  # a number, even where nothing is seen
    for j in range(low, high):
        e = exp(load(scores, j * LANES) - base)
        store(scores, j * LANES, e)
        sums += e
    return top, sums


@Entry
def attend_small(lo, hi, thread, a):
    """A job: one head of keys, with all heads of queries that read it."""
    out, lse, scale = f32(a[5]), f32(a[6]), np.float32(real(a[16]))
    length, keys, heads, groups, size = a[9], a[10], a[11], a[12], a[13]
    group, pad, pitch, apart = heads // groups, padded(size), heads * size, groups * size
    k, v, q, scores, columns, tops_of, sums_of, firsts, ends = parts(a[7] + thread * a[8], length, keys)[:9]
    for item in range(lo, hi):
        batch, kv = item // groups, item % groups
        source = (batch * keys * groups + kv) * size
        copy_rows(k, f32(a[1]), source, apart, keys, size, ONE)
        copy_rows(v, f32(a[2]), source, apart, keys, size, ONE)
        fill_ranges(firsts, ends, a[3], a[4], batch, length, keys)
        for head in range(kv * group, (kv + 1) * group):
            place, line = (batch * length * heads + head) * size, (batch * heads + head) * length
            copy_rows(q, f32(a[0]), place, pitch, length, size, scale)
            for query in range(0, length, LANES):
                rows = min(LANES, length - query)
                low, high = any_sees(firsts, ends, query, rows, keys)
                to_lanes(columns, q, query, pad)
                products(scores, columns, k, pad, low, high)
                top, sums = soften(scores, load(firsts, query), load(ends, query), low, high)
                clear(columns, pad * LANES)
                add_weighted(columns, 0, scores, v, pad, low, high)
                store(tops_of, 0, top)
                store(sums_of, 0, sums)
                for i in range(rows):
                    lse[line + query + i] = tops_of[i] + math.log(sums_of[i]) if sums_of[i] != ZERO else NOTHING
                inverse = splat(ONE) / otherwise(sums, splat(ONE), sums)
                for d in range(0, pad * LANES, LANES):
                    store(columns, d, load(columns, d) * inverse)
                from_lanes(out, place + query * pitch, pitch, rows, size, columns, 0, ONE)


@inline
def slopes(scores, steps, low, high, firsts, ends, lse, delta):
    """Scores to p, dp to ds but for the scale, in place: queries in the lanes."""
    for j in range(low, high):
        at = splat(np.float32(j))
        p = exp(load(scores, j * LANES) - lse)
        store(steps, j * LANES, between(p * (load(steps, j * LANES) - delta), at, firsts, ends, splat(ZERO)))


@inline
def slopes_of_keys(scores, steps, low, high, key, firsts, ends, lse, line, deltas):
    """The same with keys in the lanes, and p too."""
    for i in range(low, high):
        first, end, at = np.int64(firsts[i]), np.int64(ends[i]), i * LANES
        p = exp(load(scores, at) - lse[line + i])
        store(steps, at, within(p * (load(steps, at) - deltas[i]), key, first, end, ZERO))
        store(scores, at, within(p, key, first, end, ZERO))


@inline
def sum_products(to, i, x, y, pad):
    so_far = splat(ZERO)
    for d in range(0, pad * LANES, LANES):
        so_far += load(x, d) * load(y, d)
    store(to, i, so_far)


@Entry
def attend_small_back(lo, hi, thread, a):
    """A job: as forward."""
    lse, length, keys, heads, groups, size, scale = f32(a[5]), a[13], a[14], a[15], a[16], a[17], np.float32(real(a[20]))
    group, pad, pitch, apart = heads // groups, padded(size), heads * size, groups * size
    k, v, q, dout, out, scores, steps, dk, dv, x, y, firsts, ends, deltas = parts(a[11] + thread * a[12], length, keys)
    for item in range(lo, hi):
        batch, kv = item // groups, item % groups
        source = (batch * keys * groups + kv) * size
        copy_rows(k, f32(a[2]), source, apart, keys, size, ONE)
        copy_rows(v, f32(a[3]), source, apart, keys, size, ONE)
        fill_ranges(firsts, ends, a[6], a[7], batch, length, keys)
        clear(dk, whole(keys) * pad)
        clear(dv, whole(keys) * pad)
        for head in range(kv * group, (kv + 1) * group):
            place, line = (batch * length * heads + head) * size, (batch * heads + head) * length
            copy_rows(q, f32(a[1]), place, pitch, length, size, scale)
            copy_rows(dout, f32(a[0]), place, pitch, length, size, ONE)
            copy_rows(out, f32(a[4]), place, pitch, length, size, ONE)
            for query in range(0, length, LANES):
                rows = min(LANES, length - query)
                low, high = any_sees(firsts, ends, query, rows, keys)
                to_lanes(x, out, query, pad)
                to_lanes(y, dout, query, pad)
                sum_products(deltas, query, x, y, pad)
                products(steps, y, v, pad, low, high)
                to_lanes(x, q, query, pad)
                products(scores, x, k, pad, low, high)
                of_lanes, delta = load_to(lse, line + query, line + length), load(deltas, query)
                slopes(scores, steps, low, high, load(firsts, query), load(ends, query), of_lanes, delta)
                clear(x, pad * LANES)
                add_weighted(x, 0, steps, k, pad, low, high)
                from_lanes(f32(a[8]), place + query * pitch, pitch, rows, size, x, 0, scale)
            for key in range(0, keys, LANES):
                low, high = who_sees(firsts, ends, key, length)
                to_lanes(x, k, key, pad)
                products(scores, x, q, pad, low, high)
                to_lanes(x, v, key, pad)
                products(steps, x, dout, pad, low, high)
                slopes_of_keys(scores, steps, low, high, key, firsts, ends, lse, line, deltas)
                add_weighted(dk, key * pad, steps, q, pad, low, high)
                add_weighted(dv, key * pad, scores, dout, pad, low, high)
        for key in range(0, keys, LANES):
            rows = min(LANES, keys - key)
            from_lanes(f32(a[9]), source + key * apart, apart, rows, size, dk, key * pad, ONE)
            from_lanes(f32(a[10]), source + key * apart, apart, rows, size, dv, key * pad, ONE)


# ---- binding ------------------------------------------------------------------------------------


def is_small(q, k) -> bool:
    return q.dtype == k.dtype == np.float32 and q.shape[3] <= WIDEST and max(q.shape[1], k.shape[1]) <= LONGEST


def thread_bytes(q, k) -> int:
    return PARTS * 4 * LANES * (-(-max(q.shape[1], k.shape[1]) // LANES) * LANES + 1)  # PARTS * part_bytes, uncompiled


def jobs_together(q, k) -> int:
    return share(q.shape[1] * q.shape[2] // k.shape[2] * k.shape[1] * 4)
