"""Attention in blocks of queries and keys, forward and back, without ever holding all scores.

After Dao et al., FlashAttention (2022): a softmax that is corrected as further keys come, and a backward pass that makes the
scores again from the log of their sums. A job belongs to one head of keys and values; nothing is added across jobs, so
there are no atomics, and the sums' order is fixed. All memory beside the results is a few blocks for each thread.
"""

import math
from math import ceil

import numpy as np

from llamatrain.kernels.cpu import small_attention as small
from llamatrain.kernels.cpu import tiles
from llamatrain.kernels.cpu.binding import kernel
from llamatrain.kernels.cpu.norm import dot
from llamatrain.kernels.cpu.small_attention import is_small, seen
from llamatrain.kernels.cpu.tiles import PAIRS, multiply, pack_a, pack_b, packed_bytes, panel_bytes, panel_tiles, tile_depth
from llamatrain.machine.entry import Entry, f32, i32, real, u16
from llamatrain.machine.jit import inline
from llamatrain.machine.simd.memory import load, load_to, store, store_to
from llamatrain.machine.simd.vector import LANES, exp, larger, largest, splat, total, within

SIDE = np.int64(64)  # queries and keys of a block of scores
TOGETHER = 4  # blocks of queries (backward: of keys) that share one packing of the other side
FEW = 4  # queries that are not worth packing the keys for
# Typed: of a plain number Numba makes a type, and compiles what is called with it once more.
ALONG, ACROSS, ANEW, MORE, BY_ROWS, PLAIN = (np.int64(word) for word in (0, 1, 0, 1, 1, tiles.FLOAT32))
NOTHING, ZERO, ONE = np.float32(-np.inf), np.float32(0), np.float32(1)


@inline
def query_block(u, kv, length, group):
    """Head, first query and number of queries of block u of those that read a head of keys."""
    blocks = (length + SIDE - 1) // SIDE
    query = u % blocks * SIDE
    return kv * group + u // blocks, query, min(SIDE, length - query)


@inline
def fill_range(to, starts, lasts, given, batch, query, rows, length, keys):
    """What each query of a block sees, and after that what any of them sees."""
    low, high = keys, 0
    for row in range(rows):
        first, end = seen(starts, lasts, given, batch, query + row, length, keys)
        to[2 * row], to[2 * row + 1] = first, end
        if first < end:
            low, high = min(low, first), max(high, end)
    to[2 * SIDE], to[2 * SIDE + 1] = low, high


RANGES = 8 * int(SIDE) + 64  # bytes of such a table
ROW_OF_ROWS = 4 * int(SIDE)  # bytes of a number for each query


@inline
def scale_row(x, start, size, factor):
    for i in range(start, start + size, LANES):
        store_to(x, i, start + size, load_to(x, i, start + size) * factor, 0)


@inline
def clear_rows(x, start, rows, pitch, size):
    for row in range(rows):
        first = start + row * pitch
        for i in range(first, first + size, LANES):
            store_to(x, i, first + size, splat(ZERO), 0)


@inline
def put(mode, to, row, column, across, values):
    """A part of a row of a packed left operand, `across` tiles wide."""
    if mode >= PAIRS:
        store(u16(to), (((row >> 4) * across + (column >> 5)) << 9) + ((row & 15) << 5) + (column & 31), values)
    else:
        store(f32(to), (((row >> 4) * across + (column >> 4)) << 8) + ((row & 15) << 4) + (column & 15), values)


@inline
def visible(values, j, first, end, whole, other):
    return values if whole else within(values, j, first, end, other)


# ---- forward ----------------------------------------------------------------------------------


@inline
def top_of(scores, line, count, first, end, whole, scale):
    """The largest visible score; what is not a number is passed over, and shows in the sum."""
    top = splat(NOTHING)
    for j in range(0, count, LANES):
        top = larger(visible(load(scores, line + j) * scale, j, first, end, whole, NOTHING), top)
    return largest(top)


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
        sums[row] += total(so_far)


STATE = RANGES + 2 * ROW_OF_ROWS


@inline
def open_block(a, state, u, batch, kv):
    """Nothing seen yet. Gives the range of keys."""
    length, keys, heads, size = a[9], a[10], a[11], a[13]
    head, query, rows = query_block(u, kv, length, heads // a[12])
    fill_range(i32(state), i32(a[3]), i32(a[4]), a[4] != 0, batch, query, rows, length, keys)
    for row in range(rows):
        f32(state + RANGES)[row], f32(state + RANGES + ROW_OF_ROWS)[row] = NOTHING, ZERO
    clear_rows(f32(a[5]), ((batch * length + query) * heads + head) * size, rows, heads * size, size)
    return i32(state)[2 * SIDE], i32(state)[2 * SIDE + 1]


@inline
def close_block(a, state, u, batch, kv):
    """The sums' logs, and out divided by the sums."""
    out, lse, length, heads, size = f32(a[5]), f32(a[6]), a[9], a[11], a[13]
    head, query, rows = query_block(u, kv, length, heads // a[12])
    tops, sums = f32(state + RANGES), f32(state + RANGES + ROW_OF_ROWS)
    for row in range(rows):
        line = (batch * heads + head) * length + query + row
        if sums[row] == ZERO:
            lse[line] = NOTHING
        else:
            lse[line] = tops[row] + math.log(sums[row])
            scale_row(out, ((batch * length + query + row) * heads + head) * size, size, ONE / sums[row])


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
            even, odd = load_to(out, start + i, start + size), splat(ZERO)
            for j in range(0, across, 2):
                at, after = source + j * apart, source + min(j + 1, across - 1) * apart
                weight = line + j // 16 * 256 + j % 16  # beyond the last key it is 0
                even += load_to(v, at + i, at + size) * weights[weight]
                odd += load_to(v, after + i, after + size) * weights[weight + 1]
            store_to(out, start + i, start + size, even + odd, 0)


@inline
def attend_directly(a, scores, packed_p, state, place, pitch, rows, key, source, across):
    out, size, apart, half, scale = f32(a[5]), a[13], a[12] * a[13], a[15], np.float32(real(a[16]))
    if half:
        direct_scores(f32(scores), u16(a[0]), place, pitch, rows, u16(a[1]), source, apart, across, size)
    else:
        direct_scores(f32(scores), f32(a[0]), place, pitch, rows, f32(a[1]), source, apart, across, size)
    soften(PLAIN, f32(scores), packed_p, rows, across, key, state, out, place, pitch, size, scale)
    if half:
        add_values(out, place, pitch, rows, u16(a[2]), source, apart, across, size, f32(packed_p))
    else:
        add_values(out, place, pitch, rows, f32(a[2]), source, apart, across, size, f32(packed_p))


@Entry
def attend(lo, hi, thread, a):
    """A job: up to TOGETHER blocks of queries that read one head of keys."""
    length, keys, heads, groups, size, mode, half, scale = a[9], a[10], a[11], a[12], a[13], a[14], a[15], np.float32(real(a[16]))
    group, wide, pitch, apart, few = heads // groups, 2 if half else 4, heads * size, groups * size, length <= FEW
    blocks = (length + SIDE - 1) // SIDE * group
    jobs = (blocks + TOGETHER - 1) // TOGETHER
    panel, panel_across = panel_bytes(mode, SIDE, size), panel_bytes(mode, size, SIDE)
    packed_q = a[7] + thread * a[8]
    packed_k, packed_v = packed_q + TOGETHER * panel, packed_q + (TOGETHER + 1) * panel
    packed_p = packed_v + panel_across
    scores = packed_p + panel_bytes(mode, SIDE, SIDE)
    states = scores + 4 * SIDE * SIDE
    tiles.begin(mode)
    for item in range(lo, hi):
        first, batch, kv = item % jobs * TOGETHER, item // jobs // groups, item // jobs % groups
        count, low, high = min(TOGETHER, blocks - first), keys, 0
        for u in range(count):
            block_low, block_high = open_block(a, states + u * STATE, first + u, batch, kv)
            low, high = min(low, block_low), max(high, block_high)
            head, query, rows = query_block(first + u, kv, length, group)
            place = ((batch * length + query) * heads + head) * size
            if not few:
                pack_a(mode, packed_q + u * panel, a[0] + place * wide, half, ALONG, pitch, rows, size)
        for key in range(low // SIDE * SIDE, high, SIDE):
            across, source = min(SIDE, keys - key), ((batch * keys + key) * groups + kv) * size
            if not few:
                pack_b(mode, packed_k, a[1] + source * wide, half, ALONG, apart, across, size)
                pack_b(mode, packed_v, a[2] + source * wide, half, ACROSS, apart, size, across)
            for u in range(count):
                state = states + u * STATE
                head, query, rows = query_block(first + u, kv, length, group)
                place = ((batch * length + query) * heads + head) * size
                if i32(state)[2 * SIDE] >= key + across or i32(state)[2 * SIDE + 1] <= key:
                    continue
                if few:
                    attend_directly(a, scores, packed_p, state, place, pitch, rows, key, source, across)
                else:
                    multiply(mode, scores, SIDE, packed_q + u * panel, packed_k, rows, across, size, ANEW, BY_ROWS)
                    soften(mode, f32(scores), packed_p, rows, across, key, state, f32(a[5]), place, pitch, size, scale)
                    multiply(mode, a[5] + 4 * place, pitch, packed_p, packed_v, rows, size, across, MORE, BY_ROWS)
        for u in range(count):
            close_block(a, states + u * STATE, first + u, batch, kv)
    tiles.end(mode)


# ---- backward -----------------------------------------------------------------------------------
# p = exp(scores - lse), dp = dout vᵀ, ds = p (dp - sum of dout out) scale; dq = ds k, dk = dsᵀ q, dv = pᵀ dout


@inline
def soften_back(mode, scores, slopes, to, rows, count, key, state, lse, line, scale):
    """Scores to p, dp to ds, in place; ds packed, too."""
    ranges, deltas, across = i32(state), f32(state + RANGES), panel_tiles(mode, count)
    filled = across * tile_depth(mode)
    for row in range(rows):
        at, first, end = row * SIDE, ranges[2 * row] - key, min(ranges[2 * row + 1] - key, count)
        whole, base, delta = first <= 0 and end >= filled, lse[line + row], deltas[row]
        for j in range(0, filled, LANES):
            p = visible(exp(load(scores, at + j) * scale - base), j, first, end, whole, ZERO)
            ds = visible(p * (load(slopes, at + j) - delta) * scale, j, first, end, whole, ZERO)
            store(scores, at + j, p)
            store(slopes, at + j, ds)
            put(mode, to, row, j, across, ds)


@inline
def clear_gradients(dq, dk, dv, batch, kv, length, keys, heads, groups, size):
    group = heads // groups
    for x in (dk, dv):
        clear_rows(x, (batch * keys * groups + kv) * size, keys, groups * size, size)
    clear_rows(dq, (batch * length * heads + kv * group) * size, length, heads * size, group * size)


@inline
def pack_queries(a, mode, to, place, rows, state):
    """q and dout, each as a left operand and across as a right one; for each query the sum of dout out."""
    dout, heads, size, half, deltas = f32(a[0]), a[15], a[17], a[19], f32(state + RANGES)
    panel, panel_across, pitch = panel_bytes(mode, SIDE, size), panel_bytes(mode, size, SIDE), heads * size
    q = a[1] + place * (2 if half else 4)
    pack_a(mode, to, q, half, ALONG, pitch, rows, size)
    pack_b(mode, to + panel, q, half, ACROSS, pitch, size, rows)
    pack_a(mode, to + panel + panel_across, a[0] + 4 * place, ANEW, ALONG, pitch, rows, size)
    pack_b(mode, to + 2 * panel + panel_across, a[0] + 4 * place, ANEW, ACROSS, pitch, size, rows)
    for row in range(rows):
        line = place + row * pitch
        deltas[row] = dot(dout, line, u16(a[4]), line, size) if a[21] else dot(dout, line, f32(a[4]), line, size)


@inline
def pack_keys(a, mode, to, source, across):
    """k and v as right operands, and k across."""
    groups, size, half = a[16], a[17], a[19]
    panel, wide, pitch = panel_bytes(mode, SIDE, size), 2 if half else 4, groups * size
    pack_b(mode, to, a[2] + source * wide, half, ALONG, pitch, across, size)
    pack_b(mode, to + panel, a[3] + source * wide, half, ALONG, pitch, across, size)
    pack_b(mode, to + 2 * panel, a[2] + source * wide, half, ACROSS, pitch, size, across)


@inline
def block_back(a, mode, work, packed_q, packed_k, place, source, line, rows, across, key, state, scale):
    """What one block of queries and one of keys give to the gradients."""
    lse, heads, groups, size = f32(a[5]), a[15], a[16], a[17]
    panel, panel_across, square = panel_bytes(mode, SIDE, size), panel_bytes(mode, size, SIDE), panel_bytes(mode, SIDE, SIDE)
    scores, slopes, packed_ds, turned = work, work + 4 * SIDE * SIDE, work + 8 * SIDE * SIDE, work + 8 * SIDE * SIDE + square
    q_across, dout, dout_across = packed_q + panel, packed_q + panel + panel_across, packed_q + 2 * panel + panel_across
    multiply(mode, scores, SIDE, packed_q, packed_k, rows, across, size, ANEW, BY_ROWS)
    multiply(mode, slopes, SIDE, dout, packed_k + panel, rows, across, size, ANEW, BY_ROWS)
    soften_back(mode, f32(scores), f32(slopes), packed_ds, rows, across, key, state, lse, line, scale)
    multiply(mode, a[8] + 4 * place, heads * size, packed_ds, packed_k + 2 * panel, rows, size, across, MORE, BY_ROWS)
    pack_a(mode, turned, scores, ANEW, ACROSS, SIDE, across, rows)
    multiply(mode, a[10] + 4 * source, groups * size, turned, dout_across, across, size, rows, MORE, BY_ROWS)
    pack_a(mode, turned, slopes, ANEW, ACROSS, SIDE, across, rows)
    multiply(mode, a[9] + 4 * source, groups * size, turned, q_across, across, size, rows, MORE, BY_ROWS)


@Entry
def attend_back(lo, hi, thread, a):
    """A job: one head of keys, with all heads of queries that read it."""
    starts, lasts, given = i32(a[6]), i32(a[7]), a[7] != 0
    length, keys, heads, groups, size, mode, scale = a[13], a[14], a[15], a[16], a[17], a[18], np.float32(real(a[20]))
    group = heads // groups
    blocks = (length + SIDE - 1) // SIDE * group
    panel, panel_across = panel_bytes(mode, SIDE, size), panel_bytes(mode, size, SIDE)
    packed_q = a[11] + thread * a[12]
    packed_k, k_bytes = packed_q + 2 * (panel + panel_across), 2 * panel + panel_across
    state = packed_k + TOGETHER * k_bytes
    work = state + STATE
    tiles.begin(mode)
    for item in range(lo, hi):
        batch, kv = item // groups, item % groups
        clear_gradients(f32(a[8]), f32(a[9]), f32(a[10]), batch, kv, length, keys, heads, groups, size)
        for first in range(0, keys, TOGETHER * SIDE):
            last = min(keys, first + TOGETHER * SIDE)
            for key in range(first, last, SIDE):
                source, to = ((batch * keys + key) * groups + kv) * size, packed_k + (key - first) // SIDE * k_bytes
                pack_keys(a, mode, to, source, min(SIDE, keys - key))
            for u in range(blocks):
                head, query, rows = query_block(u, kv, length, group)
                place, line = ((batch * length + query) * heads + head) * size, (batch * heads + head) * length + query
                fill_range(i32(state), starts, lasts, given, batch, query, rows, length, keys)
                low, high = i32(state)[2 * SIDE], min(last, i32(state)[2 * SIDE + 1])
                if low < high and high > first:
                    pack_queries(a, mode, packed_q, place, rows, state)
                for key in range(max(first, low // SIDE * SIDE), high, SIDE):
                    source, k = ((batch * keys + key) * groups + kv) * size, packed_k + (key - first) // SIDE * k_bytes
                    across = min(SIDE, keys - key)
                    block_back(a, mode, work, packed_q, k, place, source, line, rows, across, key, state, scale)
    tiles.end(mode)


# ---- binding --------------------------------------------------------------------------------------


def mode_for(q) -> int:
    return tiles.mode_of("bf16" if q.dtype == np.uint16 else "f32")


def panels(q) -> tuple[int, ...]:
    """Bytes of a packed block: of rows of a head, of a head across, of scores."""
    mode, size, side = mode_for(q), q.shape[3], int(SIDE)
    return tuple(packed_bytes(mode, *shape) for shape in ((side, size), (size, side), (side, side)))


def thread_bytes(q, k) -> int:
    if is_small(q, k):
        return small.thread_bytes(q, k)
    along, across, square = panels(q)
    return (TOGETHER + 1) * along + across + square + 4 * int(SIDE) ** 2 + TOGETHER * STATE


def thread_bytes_back(q, k) -> int:
    if is_small(q, k):
        return small.thread_bytes(q, k)
    along, across, square = panels(q)
    return 2 * (along + across) + TOGETHER * (2 * along + across) + STATE + 8 * int(SIDE) ** 2 + 2 * square


def float32_or_half(outs, ins, attrs) -> bool:
    return all(each.dtype in (np.float32, np.uint16, np.int32) for each in (*outs, *ins))


def numbers(q, k, attrs):
    (_, length, heads, size), (_, keys, groups, _) = q.shape, k.shape
    return length, keys, heads, groups, size, mode_for(q), q.dtype == np.uint16, float(attrs["scale"])


@kernel("flash_attn", scratch=lambda outs, ins, attrs, threads: threads * thread_bytes(*ins[:2]), takes=float32_or_half)
def flash_attn(outs, ins, attrs, scratch, threads):
    (q, k, v, starts, *lasts), (out, lse) = ins, outs
    (batch, length, heads, _), groups = q.shape, k.shape[2]
    words = (q, k, v, starts, lasts[0] if lasts else 0, out, lse, scratch, thread_bytes(q, k), *numbers(q, k, attrs))
    if is_small(q, k):
        return [small.attend_small.call(*words, items=batch * groups, block=small.jobs_together(q, k))]
    jobs = batch * groups * ceil(heads // groups * ceil(length / SIDE) / TOGETHER)
    return [attend.call(*words, items=jobs, block=1)]


@kernel(
    "flash_attn_back", scratch=lambda outs, ins, attrs, threads: threads * thread_bytes_back(*ins[1:3]), takes=float32_or_half
)
def flash_attn_back(outs, ins, attrs, scratch, threads):
    (dout, q, k, v, out, lse, starts, *lasts) = ins
    arrays = (dout, q, k, v, out, lse, starts, lasts[0] if lasts else 0, *outs, scratch, thread_bytes_back(q, k))
    entry, block = (small.attend_small_back, small.jobs_together(q, k)) if is_small(q, k) else (attend_back, 1)
    words = (*numbers(q, k, attrs), out.dtype == np.uint16)
    return [entry.call(*arrays, *words, items=q.shape[0] * k.shape[2], block=block)]
