"""The gated delta rule in chunks of tokens (Yang et al. 2024), so that nearly all work is matrix products.

With C tokens in a chunk, K, Q (C, d) and V (C, e) of a head, and S (d, e) the state before the chunk:

    D[i, j] = exp(g_{j+1} + ... + g_i)    for j <= i in one sample, else 0
    a[i]    = exp(g_first + ... + g_i)    if the sample of i began before the chunk, else 0
    W       = V - a K S - tril(K Kᵀ D, -1) U,  U = beta W    solved row by row: what each token changes
    O       = a Q S + (Q Kᵀ D) U
    S       = a[last] S + Kᵀ (D[last] U)

Without the correction, W is V.

A job goes through one row from chunk to chunk; the state before each is kept for the gradient. A job of the
gradient does all value heads that read one key head, so that nothing is added across jobs.
"""

from typing import Any, NamedTuple

import numpy as np

from llamatrain.compiler.declare import F32, KernelEntry, f32, i32, inline
from llamatrain.compiler.vectors import (
    LANES,
    exp,
    load,
    load_until,
    reduce_sum,
    splat,
    store,
    store_until,
)
from llamatrain.graph.ops.recurrent import CHUNK
from llamatrain.kernels.cpu.attention_blocks import (
    ACCUMULATE,
    ACROSS,
    ALONG,
    BY_ROWS,
    FLOAT32_MODE,
    IN_FLOAT32,
    ONE,
    OVERWRITE,
    ZERO,
    scale_row,
)
from llamatrain.kernels.cpu.norm import dot
from llamatrain.kernels.cpu.registry import kernel
from llamatrain.kernels.cpu.tiles import multiply, pack_a, pack_b


class Sizes(NamedTuple):
    """The sizes of a call in compiled code."""

    length: int  # tokens of a row
    key_heads: int
    heads: int
    size: int  # of a key
    width: int  # of a value
    chunk: int
    chunks: int
    pitch: int  # between rows in scratch memory that have the length of a key or a value
    correct: int  # 0 without the correction


class Sources(NamedTuple):
    """The arrays of the forward pass."""

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    starts: Any


class Gradients(NamedTuple):
    """The arrays of the gradients."""

    dq: Any
    dk: Any
    dv: Any
    dg: Any
    dbeta: Any


# The arrays of a thread's scratch memory, each in a slot of pitch x pitch numbers. Square ones have rows of
# `chunk` columns. The first ones are used in both directions.
(DECAY, CARRY, SCORES, OVERLAP, READS, ERRORS, CHANGES, Q_ROWS, K_ROWS, LEFT, RIGHT) = range(11)
(DSTATE, SLOPES, OVERLAP_SLOPES, DCHANGES, DERRORS, DREADS, PART, SUMS) = range(11, 19)
(OUT_ROWS, CHANGE_COLUMNS, STATE_ROWS) = range(19, 22)
FORWARD_SLOTS, BACK_SLOTS = 11, 22
PITCH_STEP = 64  # a row of scratch memory is a multiple of this, so that whole vectors are read and written


@inline
def slot(base, number, sizes):
    """Return the address of an array in scratch memory."""
    return base + 4 * number * sizes.pitch * sizes.pitch


# ---- steps ----------------------------------------------------------------------


@inline
def fill_decay(decay, carry, g, at, step, starts, token, first, rows, chunk):
    """Fill D and a for the tokens of a chunk: g from `at` on, the first token `first` of its row."""
    total = ONE
    for i in range(rows):
        row, factor = i * chunk, exp(g[at + i * step])
        begins = starts[token + i] >= first + i
        total = ZERO if begins else total * factor
        for j in range(0, chunk, LANES):
            store(decay, row + j, splat(ZERO) if begins or i == 0 else load(decay, row - chunk + j) * factor)
        decay[row + i] = ONE
        carry[i] = total


@inline
def multiply_elements(x, y, rows, chunk):
    """Multiply x by y, element by element, as many columns as rows."""
    for row in range(0, rows * chunk, chunk):
        for j in range(row, row + rows, LANES):
            store(x, j, load(x, j) * load(y, j))


@inline
def subtract_rows(x, row, others, first, pitch, factors, at, step, count, width):
    """Subtract from a row of x the sum of other rows, each times its factor."""
    for column in range(0, width, 4 * LANES):
        i, j = row + column, first + column
        a, b, c, d = load(x, i), load(x, i + LANES), load(x, i + 2 * LANES), load(x, i + 3 * LANES)
        for other in range(count):
            by, k = splat(factors[at + other * step]), j + other * pitch
            a -= load(others, k) * by
            b -= load(others, k + LANES) * by
            c -= load(others, k + 2 * LANES) * by
            d -= load(others, k + 3 * LANES) * by
        store(x, i, a)
        store(x, i + LANES, b)
        store(x, i + 2 * LANES, c)
        store(x, i + 3 * LANES, d)


@inline
def scaled_row(to, start, x, row, size, factor):
    """Store a row times a factor, elsewhere or in place."""
    for i in range(0, size, LANES):
        store_until(to, start + i, start + size, load_until(x, row + i, row + size) * factor, 0)


@inline
def add_scaled_row(to, start, x, row, size, factor):
    """Add a row times a factor."""
    for i in range(0, size, LANES):
        part = load_until(x, row + i, row + size) * factor
        store_until(to, start + i, start + size, load_until(to, start + i, start + size) + part, 0)


@inline
def product(to, pitch, left, right, rows, columns, depth, accumulate):
    """Multiply packed operands."""
    multiply(FLOAT32_MODE, to, pitch, left, right, rows, columns, depth, accumulate, BY_ROWS)


@inline
def pack_rows(to, source, lies, pitch, rows, depth):
    """Pack a left operand."""
    pack_a(FLOAT32_MODE, to, source, IN_FLOAT32, lies, pitch, rows, depth)


@inline
def pack_columns(to, source, lies, pitch, columns, depth):
    """Pack a right operand."""
    pack_b(FLOAT32_MODE, to, source, IN_FLOAT32, lies, pitch, columns, depth)


@inline
def token_offset(sizes, batch, first, count, head):
    """Return the offset of a token's head in an array with `count` heads, in heads."""
    return (batch * sizes.length + first) * count + head


@inline
def state_offset(sizes, batch, number, head):
    """Return the offset of a head's state before a chunk, in states."""
    return (batch * sizes.chunks + number) * sizes.heads + head


@inline
def solve_chunk(sizes, sources, base, state, batch, head, first, rows):
    """Compute D, a, the scores Q Kᵀ D, the overlap K Kᵀ D, the reads K S, W and U of a chunk.

    Without the correction, overlap and reads are left out. The state is packed in RIGHT.
    """
    size, width, chunk, pitch = sizes.size, sizes.width, sizes.chunk, sizes.pitch
    key_at = token_offset(sizes, batch, first, sizes.key_heads, head % sizes.key_heads) * size
    key_step = sizes.key_heads * size
    at = token_offset(sizes, batch, first, sizes.heads, head)
    q_rows, k_rows, right = slot(base, Q_ROWS, sizes), slot(base, K_ROWS, sizes), slot(base, RIGHT, sizes)
    scores, overlap, reads = slot(base, SCORES, sizes), slot(base, OVERLAP, sizes), slot(base, READS, sizes)
    decay, carry = f32(slot(base, DECAY, sizes)), f32(slot(base, CARRY, sizes))
    errors, changes = f32(slot(base, ERRORS, sizes)), f32(slot(base, CHANGES, sizes))
    pack_rows(q_rows, sources.q + 4 * key_at, ALONG, key_step, rows, size)
    pack_rows(k_rows, sources.k + 4 * key_at, ALONG, key_step, rows, size)
    pack_columns(right, sources.k + 4 * key_at, ALONG, key_step, rows, size)
    product(scores, chunk, q_rows, right, rows, rows, size, OVERWRITE)
    if sizes.correct:
        product(overlap, chunk, k_rows, right, rows, rows, size, OVERWRITE)
    token = batch * sizes.length + first
    fill_decay(decay, carry, f32(sources.g), at, sizes.heads, i32(sources.starts), token, first, rows, chunk)
    multiply_elements(f32(scores), decay, rows, chunk)
    pack_columns(right, state, ACROSS, width, width, size)
    if sizes.correct:
        multiply_elements(f32(overlap), decay, rows, chunk)
        product(reads, pitch, k_rows, right, rows, width, size, OVERWRITE)
    for i in range(rows):
        row, value = i * pitch, (at + i * sizes.heads) * width
        scaled_row(errors, row, f32(sources.v), value, width, ONE)
        if sizes.correct:
            f32(overlap)[i * chunk + i] = ZERO
            add_scaled_row(errors, row, f32(reads), row, width, -carry[i])
            subtract_rows(errors, row, changes, 0, pitch, f32(overlap), i * chunk, 1, i, width)
        scaled_row(changes, row, errors, row, width, f32(sources.beta)[at + i * sizes.heads])


@inline
def scale_changes(sizes, base, rows):
    """Multiply each row of U by what is left of it after the chunk."""
    changes, left = f32(slot(base, CHANGES, sizes)), f32(slot(base, DECAY, sizes))
    for i in range(rows):
        row = i * sizes.pitch
        scaled_row(changes, row, changes, row, sizes.width, left[(rows - 1) * sizes.chunk + i])


@KernelEntry
def delta_rule(lo, hi, thread, sources: Sources, out, states, scratch, thread_bytes, sizes: Sizes):
    """Compute the outputs and states of rows and heads lo to hi."""
    heads, size, width, chunk, pitch = sizes.heads, sizes.size, sizes.width, sizes.chunk, sizes.pitch
    base = scratch + thread * thread_bytes
    left, right = slot(base, LEFT, sizes), slot(base, RIGHT, sizes)
    carry = f32(slot(base, CARRY, sizes))
    for item in range(lo, hi):
        batch, head = item // heads, item % heads
        for number in range(sizes.chunks):
            first = number * chunk
            rows = min(chunk, sizes.length - first)
            place = state_offset(sizes, batch, number, head) * size * width
            if number == 0:
                for i in range(place, place + size * width, LANES):
                    store_until(f32(states), i, place + size * width, splat(ZERO), 0)
            solve_chunk(sizes, sources, base, states + 4 * place, batch, head, first, rows)
            at = token_offset(sizes, batch, first, heads, head) * width
            # `right` still has the state
            product(
                out + 4 * at, heads * width, slot(base, Q_ROWS, sizes), right, rows, width, size, OVERWRITE
            )
            for i in range(rows):
                scale_row(f32(out), at + i * heads * width, width, carry[i])
            pack_rows(left, slot(base, SCORES, sizes), ALONG, chunk, rows, rows)
            pack_columns(right, slot(base, CHANGES, sizes), ACROSS, pitch, width, rows)
            product(out + 4 * at, heads * width, left, right, rows, width, rows, ACCUMULATE)
            if number + 1 < sizes.chunks:
                after = place + heads * size * width
                scaled_row(f32(states), after, f32(states), place, size * width, carry[rows - 1])
                scale_changes(sizes, base, rows)
                key = token_offset(sizes, batch, first, sizes.key_heads, head % sizes.key_heads) * size
                pack_rows(left, sources.k + 4 * key, ACROSS, sizes.key_heads * size, size, rows)
                pack_columns(right, slot(base, CHANGES, sizes), ACROSS, pitch, width, rows)
                product(states + 4 * after, width, left, right, size, width, rows, ACCUMULATE)


# ---- gradient -------------------------------------------------------------------


@inline
def changes_back(sizes, sources, gradients, base, dout, batch, head, first, rows):
    """Compute the gradients of U, W, V and beta, and what the state after the chunk adds to those of D[last]."""
    size, width, chunk, pitch, heads = sizes.size, sizes.width, sizes.chunk, sizes.pitch, sizes.heads
    at = token_offset(sizes, batch, first, heads, head)
    left, right, part = slot(base, LEFT, sizes), slot(base, RIGHT, sizes), slot(base, PART, sizes)
    dchanges, derrors = slot(base, DCHANGES, sizes), slot(base, DERRORS, sizes)
    changes, errors = f32(slot(base, CHANGES, sizes)), f32(slot(base, ERRORS, sizes))
    decay, sums = f32(slot(base, DECAY, sizes)), f32(slot(base, SUMS, sizes))
    pack_rows(left, slot(base, SCORES, sizes), ACROSS, chunk, rows, rows)
    pack_columns(right, dout + 4 * at * width, ACROSS, heads * width, width, rows)
    product(dchanges, pitch, left, right, rows, width, rows, OVERWRITE)
    pack_columns(right, slot(base, DSTATE, sizes), ACROSS, width, width, size)
    product(part, pitch, slot(base, K_ROWS, sizes), right, rows, width, size, OVERWRITE)
    total = ZERO
    for i in range(rows):
        row, factor = i * pitch, decay[(rows - 1) * chunk + i]
        slope = factor * dot(changes, row, f32(part), row, width)
        sums[i] = -slope
        total += slope
        add_scaled_row(f32(dchanges), row, f32(part), row, width, factor)
    sums[rows - 1] += total
    for back in range(rows):
        i = rows - 1 - back
        row, number = i * pitch, at + i * heads
        if sizes.correct:
            subtract_rows(
                f32(dchanges),
                row,
                f32(derrors),
                row + pitch,
                pitch,
                f32(slot(base, OVERLAP, sizes)),
                (i + 1) * chunk + i,
                chunk,
                back,
                width,
            )
        f32(gradients.dbeta)[number] = dot(f32(dchanges), row, errors, row, width)
        scaled_row(f32(derrors), row, f32(dchanges), row, width, f32(sources.beta)[number])
        scaled_row(f32(gradients.dv), number * width, f32(derrors), row, width, ONE)


@inline
def decay_back(sizes, base, rows):
    """Convert the gradients of scores and overlap to those of Q Kᵀ and K Kᵀ, and add those of the decay to `sums`."""
    chunk = sizes.chunk
    slopes, overlap_slopes = f32(slot(base, SLOPES, sizes)), f32(slot(base, OVERLAP_SLOPES, sizes))
    scores, overlap = f32(slot(base, SCORES, sizes)), f32(slot(base, OVERLAP, sizes))
    decay, sums = f32(slot(base, DECAY, sizes)), f32(slot(base, SUMS, sizes))
    for i in range(rows):
        row, total = i * chunk, splat(ZERO)
        for j in range(0, i + 1, LANES):
            at = row + j
            d = load_until(decay, at, row + rows)
            s = load_until(slopes, at, row + rows)
            slope = s * load_until(scores, at, row + rows)
            store(slopes, at, s * d)
            if sizes.correct:
                o = load_until(overlap_slopes, at, row + rows)
                slope -= o * load_until(overlap, at, row + rows)
                store(overlap_slopes, at, o * d * np.float32(-1))
            total += slope
            store_until(sums, j, rows, load_until(sums, j, rows) - slope, 0)
        for j in range((i + LANES) // LANES * LANES, rows, LANES):
            store(slopes, row + j, splat(ZERO))
            store(overlap_slopes, row + j, splat(ZERO))
        overlap_slopes[row + i] = ZERO
        sums[i] += reduce_sum(total)


@inline
def keys_back(sizes, sources, gradients, base, state, key_at, rows, add):
    """Compute the gradients of q and k of a chunk; `add` to those of other heads. LEFT and RIGHT are overwritten."""
    size, width, chunk, pitch = sizes.size, sizes.width, sizes.chunk, sizes.pitch
    step = sizes.key_heads * size
    left, right, part = slot(base, LEFT, sizes), slot(base, RIGHT, sizes), slot(base, PART, sizes)
    slopes, overlap_slopes = slot(base, SLOPES, sizes), slot(base, OVERLAP_SLOPES, sizes)
    state_rows, dreads = slot(base, STATE_ROWS, sizes), slot(base, DREADS, sizes)
    carry, sums = f32(slot(base, CARRY, sizes)), f32(slot(base, SUMS, sizes))
    dq, dk = gradients.dq + 4 * key_at, gradients.dk + 4 * key_at
    pack_columns(state_rows, state, ALONG, width, size, width)
    product(part, pitch, slot(base, OUT_ROWS, sizes), state_rows, rows, size, width, OVERWRITE)
    pack_columns(right, sources.k + 4 * key_at, ACROSS, step, size, rows)
    pack_rows(left, slopes, ALONG, chunk, rows, rows)
    product(dq, step, left, right, rows, size, rows, add)
    for i in range(rows):
        sums[i] += carry[i] * dot(f32(sources.q), key_at + i * step, f32(part), i * pitch, size)
        add_scaled_row(f32(dq), i * step, f32(part), i * pitch, size, carry[i])
    if sizes.correct:
        pack_rows(left, overlap_slopes, ALONG, chunk, rows, rows)
        product(dk, step, left, right, rows, size, rows, add)
        pack_rows(left, overlap_slopes, ACROSS, chunk, rows, rows)
        product(dk, step, left, right, rows, size, rows, ACCUMULATE)
    pack_columns(right, sources.q + 4 * key_at, ACROSS, step, size, rows)
    pack_rows(left, slopes, ACROSS, chunk, rows, rows)
    product(dk, step, left, right, rows, size, rows, ACCUMULATE if sizes.correct else add)
    if sizes.correct:
        pack_rows(left, dreads, ALONG, pitch, rows, width)
        product(dk, step, left, state_rows, rows, size, width, ACCUMULATE)
    scale_changes(sizes, base, rows)
    pack_rows(left, slot(base, CHANGES, sizes), ALONG, pitch, rows, width)
    pack_columns(right, slot(base, DSTATE, sizes), ALONG, width, size, width)
    product(dk, step, left, right, rows, size, width, ACCUMULATE)


@inline
def state_back(sizes, sources, base, dout, state, key_at, value_at, rows):
    """Replace the gradient of the state after a chunk by that of the state before it."""
    size, width, pitch = sizes.size, sizes.width, sizes.pitch
    key_step, value_step = sizes.key_heads * size, sizes.heads * width
    left, right, part = slot(base, LEFT, sizes), slot(base, RIGHT, sizes), slot(base, PART, sizes)
    dstate, carry = slot(base, DSTATE, sizes), f32(slot(base, CARRY, sizes))
    kept = carry[rows - 1]
    sums = f32(slot(base, SUMS, sizes))
    sums[rows - 1] += kept * dot(f32(state), 0, f32(dstate), 0, size * width)
    scale_row(f32(dstate), 0, size * width, kept)
    for i in range(rows):
        scaled_row(f32(part), i * pitch, f32(dout), value_at + i * value_step, width, carry[i])
    pack_rows(left, sources.q + 4 * key_at, ACROSS, key_step, size, rows)
    pack_columns(right, part, ACROSS, pitch, width, rows)
    product(dstate, width, left, right, size, width, rows, ACCUMULATE)
    if sizes.correct:
        pack_rows(left, sources.k + 4 * key_at, ACROSS, key_step, size, rows)
        pack_columns(right, slot(base, DREADS, sizes), ACROSS, pitch, width, rows)
        product(dstate, width, left, right, size, width, rows, ACCUMULATE)


@inline
def chunk_back(sizes, sources, gradients, base, dout, state, batch, head, first, rows):
    """Compute the gradients of a chunk and of the state before it, by those of the outputs and the state after it."""
    width, chunk, pitch, heads = sizes.width, sizes.chunk, sizes.pitch, sizes.heads
    key_at = token_offset(sizes, batch, first, sizes.key_heads, head % sizes.key_heads) * sizes.size
    at = token_offset(sizes, batch, first, heads, head)
    out_rows, columns = slot(base, OUT_ROWS, sizes), slot(base, CHANGE_COLUMNS, sizes)
    left, derrors, dreads = slot(base, LEFT, sizes), slot(base, DERRORS, sizes), slot(base, DREADS, sizes)
    carry, sums = f32(slot(base, CARRY, sizes)), f32(slot(base, SUMS, sizes))
    solve_chunk(sizes, sources, base, state, batch, head, first, rows)
    pack_rows(out_rows, dout + 4 * at * width, ALONG, heads * width, rows, width)
    pack_columns(columns, slot(base, CHANGES, sizes), ALONG, pitch, rows, width)
    product(slot(base, SLOPES, sizes), chunk, out_rows, columns, rows, rows, width, OVERWRITE)
    changes_back(sizes, sources, gradients, base, dout, batch, head, first, rows)
    if sizes.correct:
        pack_rows(left, derrors, ALONG, pitch, rows, width)
        product(slot(base, OVERLAP_SLOPES, sizes), chunk, left, columns, rows, rows, width, OVERWRITE)
    decay_back(sizes, base, rows)
    if sizes.correct:
        for i in range(rows):
            scaled_row(f32(dreads), i * pitch, f32(derrors), i * pitch, width, -carry[i])
            sums[i] += dot(f32(dreads), i * pitch, f32(slot(base, READS, sizes)), i * pitch, width)
    keys_back(sizes, sources, gradients, base, state, key_at, rows, int(head >= sizes.key_heads))
    state_back(sizes, sources, base, dout, state, key_at, at * width, rows)
    total = ZERO
    for back in range(rows):
        i = rows - 1 - back
        total += sums[i]
        f32(gradients.dg)[at + i * heads] = total


@KernelEntry
def delta_rule_back(
    lo,
    hi,
    thread,
    sources: Sources,
    dout,
    states,
    gradients: Gradients,
    scratch,
    thread_bytes,
    sizes: Sizes,
):
    """Compute the gradients of rows and key heads lo to hi."""
    cells = sizes.size * sizes.width
    base = scratch + thread * thread_bytes
    dstate = f32(slot(base, DSTATE, sizes))
    for item in range(lo, hi):
        batch = item // sizes.key_heads
        for head in range(item % sizes.key_heads, sizes.heads, sizes.key_heads):
            for i in range(0, cells, LANES):
                store_until(dstate, i, cells, splat(ZERO), 0)
            for back in range(sizes.chunks):
                number = sizes.chunks - 1 - back
                first = number * sizes.chunk
                rows = min(sizes.chunk, sizes.length - first)
                state = states + 4 * state_offset(sizes, batch, number, head) * cells
                chunk_back(sizes, sources, gradients, base, dout, state, batch, head, first, rows)


# ---- decoding -------------------------------------------------------------------


@inline
def step_columns(sizes, sources, state, cells, out, batch, head, column, until):
    """Process all tokens for some columns of a head's state."""
    size, width, heads = sizes.size, sizes.width, sizes.heads
    q, k, v = f32(sources.q), f32(sources.k), f32(sources.v)
    for token in range(sizes.length):
        key = token_offset(sizes, batch, token, sizes.key_heads, head % sizes.key_heads) * size
        at = token_offset(sizes, batch, token, heads, head)
        value, factor = at * width + column, exp(f32(sources.g)[at])
        end = at * width + until
        known, other = splat(ZERO), splat(ZERO)
        for row in range(size):
            cell, last = cells + row * width + column, cells + row * width + until
            known += load_until(state, cell, last) * k[key + row]
            other += load_until(state, cell + LANES, last) * k[key + row]
        beta, kept = f32(sources.beta)[at], factor if sizes.correct else ZERO
        change = (load_until(v, value, end) - known * kept) * beta
        change_other = (load_until(v, value + LANES, end) - other * kept) * beta
        told, told_other = splat(ZERO), splat(ZERO)
        for row in range(size):
            cell, last = cells + row * width + column, cells + row * width + until
            a = load_until(state, cell, last) * factor + change * k[key + row]
            b = load_until(state, cell + LANES, last) * factor + change_other * k[key + row]
            store_until(state, cell, last, a, 0)
            store_until(state, cell + LANES, last, b, 0)
            told += a * q[key + row]
            told_other += b * q[key + row]
        store_until(out, value, end, told, 0)
        store_until(out, value + LANES, end, told_other, 0)


@KernelEntry
def delta_steps(lo, hi, thread, before: F32, sources: Sources, state: F32, out: F32, sizes: Sizes):
    """Process all tokens of rows and heads lo to hi, token by token, from a state."""
    cells = sizes.size * sizes.width
    for item in range(lo, hi):
        scaled_row(state, item * cells, before, item * cells, cells, ONE)
        for column in range(0, sizes.width, 2 * LANES):
            until = min(column + 2 * LANES, sizes.width)
            step_columns(
                sizes,
                sources,
                state,
                item * cells,
                out,
                item // sizes.heads,
                item % sizes.heads,
                column,
                until,
            )


# ---- binding --------------------------------------------------------------------


def make_sizes(q, v, chunk: int = CHUNK, correct: bool = True) -> Sizes:
    """Return the sizes of a call."""
    (_, length, key_heads, size), (heads, width) = q.shape, v.shape[2:]
    pitch = -(-max(chunk, size, width) // PITCH_STEP) * PITCH_STEP
    return Sizes(length, key_heads, heads, size, width, chunk, -(-length // chunk), pitch, int(correct))


def thread_bytes(q, v, attrs, slots: int) -> int:
    """Return the bytes that a thread needs."""
    return 4 * slots * make_sizes(q, v, **attrs).pitch ** 2


@kernel(
    "gated_delta_rule",
    scratch=lambda outs, ins, attrs, threads: threads * thread_bytes(ins[0], ins[2], attrs, FORWARD_SLOTS),
)
def gated_delta_rule(outs, ins, attrs, scratch, threads):
    """Return the call of `gated_delta_rule`."""
    (out, states), (q, _, v, *_) = outs, ins
    how = {
        "scratch": scratch,
        "thread_bytes": thread_bytes(q, v, attrs, FORWARD_SLOTS),
        "sizes": make_sizes(q, v, **attrs),
    }
    return [delta_rule.call(Sources(*ins), out, states, **how, items=v.shape[0] * v.shape[2], block=1)]


@kernel(
    "gated_delta_rule_back",
    scratch=lambda outs, ins, attrs, threads: threads * thread_bytes(ins[1], ins[3], attrs, BACK_SLOTS),
)
def gated_delta_rule_back(outs, ins, attrs, scratch, threads):
    """Return the call of `gated_delta_rule_back`."""
    dout, q, k, v, g, beta, starts, states = ins
    how = {
        "scratch": scratch,
        "thread_bytes": thread_bytes(q, v, attrs, BACK_SLOTS),
        "sizes": make_sizes(q, v, **attrs),
    }
    sources = Sources(q, k, v, g, beta, starts)
    return [
        delta_rule_back.call(
            sources, dout, states, Gradients(*outs), **how, items=q.shape[0] * q.shape[2], block=1
        )
    ]


@kernel("gated_delta_step")
def gated_delta_step(outs, ins, attrs, scratch, threads):
    """Return the call of `gated_delta_step`."""
    (state_out, out), (state, q, k, v, g, beta) = outs, ins
    return [
        delta_steps.call(
            state,
            Sources(q, k, v, g, beta, 0),
            state_out,
            out,
            make_sizes(q, v, 16, attrs.get("correct", True)),
            items=v.shape[0] * v.shape[2],
            block=1,
        )
    ]
