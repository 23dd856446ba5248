"""The optimizer step: one pass over weights, moments and gradient.

schedule: rate, 1 - beta1^t, 1 - beta2^t; factor multiplies the gradient first. The arithmetic is that of
torch.optim, in float32. A weight is processed in rows: its own if only some of them have a gradient, else as
long as a block.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from llamatrain.compiler.declare import F32, F64, I32, Call, KernelEntry, Real, f32, i32, inline
from llamatrain.compiler.vectors import LANES, load_until, splat, sqrt, store_until
from llamatrain.kernels.cpu.chunking import choose_block
from llamatrain.kernels.cpu.norm import dot
from llamatrain.kernels.cpu.reduce import BLOCK, add_up
from llamatrain.kernels.cpu.registry import kernel


class SparseRows(NamedTuple):
    """A gradient of `size` elements in rows: all of them, or with `places` the nonzero ones."""

    values: F32
    places: Any
    width: int
    size: int


@inline
def gradient_range(g, row):
    """Return where the gradient of a row begins and ends; an empty range if it is 0."""
    size = min(g.width, g.size - row * g.width)
    if g.places == 0:
        return row * g.width, row * g.width + size
    place = i32(g.places)[row]
    return (place * g.width, place * g.width + size) if place >= 0 else (0, 0)


@KernelEntry
def adamw_rows(
    lo,
    hi,
    thread,
    w: F32,
    m: F32,
    v: F32,
    g: SparseRows,
    schedule: F32,
    factors: F32,
    beta1: Real,
    beta2: Real,
    eps: Real,
    decay: Real,
):
    """Update rows lo to hi of a weight and its moments by AdamW."""
    factor = factors[0]
    keep = np.float32(1 - schedule[0] * decay)
    step = np.float32(-schedule[0] / schedule[1])
    spread = np.float32(math.sqrt(schedule[2]))
    for row in range(lo, hi):
        source, there = gradient_range(g, row)
        start, end = row * g.width, min(g.size, (row + 1) * g.width)
        for i in range(start, end, LANES):
            gradient = load_until(g.values, source + i - start, there) * factor
            first, second = load_until(m, i, end), load_until(v, i, end)
            first = first + (gradient - first) * np.float32(1 - beta1)
            second = second * np.float32(beta2) + gradient * gradient * np.float32(1 - beta2)
            store_until(m, i, end, first, 0)
            store_until(v, i, end, second, 0)
            change = first / (sqrt(second) / spread + np.float32(eps))
            store_until(w, i, end, load_until(w, i, end) * keep + change * step, 0)


@KernelEntry
def sgd_rows(
    lo, hi, thread, w: F32, m: F32, g: SparseRows, schedule: F32, factors: F32, momentum: Real, decay: Real
):
    """Update rows lo to hi of a weight and its momentum by SGD."""
    rate, factor = schedule[0], factors[0]
    carried, keep = np.float32(momentum), np.float32(1 - rate * decay)
    for row in range(lo, hi):
        source, there = gradient_range(g, row)
        start, end = row * g.width, min(g.size, (row + 1) * g.width)
        for i in range(start, end, LANES):
            gradient = (
                load_until(g.values, source + i - start, there) * factor
            )  # rounded here; the sum below is fused with the other product
            change = load_until(m, i, end) * carried + gradient
            store_until(m, i, end, change, 0)
            store_until(w, i, end, load_until(w, i, end) * keep - change * rate, 0)


def update_calls(
    entry: KernelEntry, state_count: int, ins: list[np.ndarray], numbers: dict[str, float]
) -> list[Call]:
    """Return the call of an entry that updates a weight.

    `ins` are the weight, its states, the gradient, the schedule, the factor, and places if there are any.
    """
    weight_and_states, (g, schedule, factor, *places) = ins[: 1 + state_count], ins[1 + state_count :]
    size = weight_and_states[0].size
    width = weight_and_states[0].shape[1] if places else max(1, min(size, choose_block(size, 8, LANES)))
    sparse, rows = SparseRows(g, places[0] if places else 0, width, size), -(-size // max(1, width))
    return [
        entry.call(
            *weight_and_states,
            sparse,
            schedule,
            factor,
            **numbers,
            items=rows,
            block=choose_block(rows, 8 * width),
        )
    ]


@kernel("opt_step_adamw")
def opt_step_adamw(outs, ins, attrs, scratch, threads):
    """Return the calls of `opt_step_adamw`."""
    return update_calls(
        adamw_rows, 2, ins, {name: attrs[name] for name in ("beta1", "beta2", "eps", "decay")}
    )


@kernel("opt_step_sgd")
def opt_step_sgd(outs, ins, attrs, scratch, threads):
    """Return the calls of `opt_step_sgd`."""
    return update_calls(sgd_rows, 1, ins, {name: attrs[name] for name in ("momentum", "decay")})


@KernelEntry
def momentum_flat(lo, hi, thread, m: F32, g: F32, out: F32, factors: F32, momentum: Real):
    """Compute m · momentum + g · factor for elements lo to hi."""
    factor, left = factors[0], np.float32(momentum)
    for i in range(lo, hi, LANES):
        store_until(out, i, hi, load_until(m, i, hi) * left + load_until(g, i, hi) * factor, 0)


for _name in ("opt_momentum", "opt_ahead"):

    @kernel(_name)
    def carried(outs, ins, attrs, scratch, threads):
        """Return the call that updates a momentum."""
        (m, g, factor), block = ins, choose_block(ins[0].size, unit=LANES)
        return [momentum_flat.call(m, g, outs[0], factor, attrs["momentum"], items=m.size, block=block)]


@KernelEntry
def unit_flat(lo, hi, thread, x: F32, squares: F32, out: F32, eps: Real):
    """Divide elements lo to hi by a norm."""
    part = np.float32(1.0 / (math.sqrt(squares[0]) + eps))
    for i in range(lo, hi, LANES):
        store_until(out, i, hi, load_until(x, i, hi) * part, 0)


@kernel("opt_unit")
def opt_unit(outs, ins, attrs, scratch, threads):
    """Return the calls of `opt_unit`."""
    x, squares = ins
    return [
        unit_flat.call(
            x, squares, outs[0], attrs["eps"], items=x.size, block=choose_block(x.size, unit=LANES)
        )
    ]


@KernelEntry
def blend_flat(lo, hi, thread, x: F32, y: F32, out: F32, a: Real, b: Real):
    """Compute a x + b y for elements lo to hi."""
    left, right = np.float32(a), np.float32(b)
    for i in range(lo, hi, LANES):
        store_until(out, i, hi, load_until(x, i, hi) * left + load_until(y, i, hi) * right, 0)


@kernel("opt_blend")
def opt_blend(outs, ins, attrs, scratch, threads):
    """Return the calls of `opt_blend`."""
    x, y = ins
    return [
        blend_flat.call(
            x, y, outs[0], attrs["a"], attrs["b"], items=x.size, block=choose_block(x.size, unit=LANES)
        )
    ]


@KernelEntry
def adapt_flat(lo, hi, thread, v: F32, x: F32, out: F32, beta: Real, eps: Real):
    """Update elements lo to hi of the average of x², and divide x by its root."""
    kept, fresh, least = np.float32(beta), np.float32(1 - beta), splat(eps)
    for i in range(lo, hi, LANES):
        value = load_until(x, i, hi)
        square = load_until(v, i, hi) * kept + value * value * fresh
        store_until(v, i, hi, square, 0)
        store_until(out, i, hi, value / (sqrt(square) + least), 0)


@kernel("opt_adapt")
def opt_adapt(outs, ins, attrs, scratch, threads):
    """Return the calls of `opt_adapt`."""
    (v, x), block = ins, choose_block(ins[0].size, unit=LANES)
    return [adapt_flat.call(v, x, outs[1], attrs["beta"], attrs["eps"], items=v.size, block=block)]


@KernelEntry
def step_flat(lo, hi, thread, w: F32, change: F32, schedule: F32, by: Real, decay: Real):
    """Apply a change to elements lo to hi of a weight."""
    keep, rate = np.float32(1 - schedule[0] * decay), np.float32(schedule[0] * by)
    for i in range(lo, hi, LANES):
        store_until(w, i, hi, load_until(w, i, hi) * keep - load_until(change, i, hi) * rate, 0)


@kernel("opt_step")
def opt_step(outs, ins, attrs, scratch, threads):
    """Return the calls of `opt_step`."""
    w, change, schedule = ins
    block = choose_block(w.size, unit=LANES)
    return [step_flat.call(w, change, schedule, attrs["by"], attrs["decay"], items=w.size, block=block)]


# ---- gradients of few rows --------------------------------------------------


@KernelEntry
def index_rows(lo, hi, thread, ids: I32, places: I32, count, rows):
    """Store for each row of the weight where its id first occurs, or -1."""
    for row in range(rows):
        places[row] = -1
    for i in range(count):
        row = count - 1 - i  # the first occurrence is written last
        if 0 <= ids[row] < rows:
            places[ids[row]] = row


@KernelEntry
def gather_rows(lo, hi, thread, dy: F32, ids: I32, out: F32, places: I32, count, width, rows):
    """Add columns lo to hi of each row to the first row with its id, in order, starting from 0."""
    for row in range(count):
        first = places[ids[row]] if 0 <= ids[row] < rows else -1
        start, to = row * width, first * width
        for i in range(lo, hi, LANES):
            value = load_until(dy, start + i, start + hi)
            if first == row:
                store_until(out, start + i, start + hi, value + splat(0.0), 0)
            else:
                if first >= 0:
                    store_until(out, to + i, to + hi, load_until(out, to + i, to + hi) + value, 0)
                store_until(out, start + i, start + hi, splat(0.0), 0)


@kernel("opt_rows")
def opt_rows(outs, ins, attrs, scratch, threads):
    """Return the calls of `opt_rows`."""
    (dy, ids), (out, places) = ins, outs
    rows, width, count = places.size, dy.shape[-1], ids.size
    seen = {"ids": ids, "places": places, "count": count, "rows": rows}
    added = gather_rows.call(
        dy, out=out, width=width, **seen, items=width, block=choose_block(width, count, 4 * LANES)
    )
    return [index_rows.call(**seen, items=1, block=1), added]


@inline
def has_rows(g, first, end):
    """Return True if a gradient of few rows has one of these."""
    found = False
    for row in range(first, end):
        found = found or i32(g.places)[row] >= 0
    return found


@KernelEntry
def sparse_square_blocks(lo, hi, thread, g: SparseRows, sums: F64, buffers):
    """Sum the squares of the blocks of `sum_sqr`, each laid out in the thread's memory."""
    buffer = f32(buffers + thread * 4 * BLOCK)
    for block in range(lo, hi):
        start, end = block * BLOCK, min(g.size, (block + 1) * BLOCK)
        if not has_rows(g, start // g.width, (end - 1) // g.width + 1):
            sums[block] = 0.0
            continue
        for row in range(start // g.width, (end - 1) // g.width + 1):
            source, there = gradient_range(g, row)
            first, last = max(start, row * g.width), min(end, (row + 1) * g.width)
            source += first - row * g.width
            for i in range(first, last, LANES):
                store_until(
                    buffer, i - start, last - start, load_until(g.values, source + i - first, there), 0
                )
        sums[block] = dot(buffer, 0, buffer, 0, end - start)


def count_blocks(g: Any, places: Any) -> int:
    """Return the number of blocks of the full gradient."""
    return int(-(-places.size * g.shape[-1] // BLOCK))


def sum_sqr_bytes(outs, ins, attrs, threads):
    """Return the bytes of the blocks' sums, and of a block for each thread."""
    return 8 * -(-count_blocks(*ins) // LANES) * LANES + threads * 4 * BLOCK


@kernel("opt_sum_sqr", scratch=sum_sqr_bytes)
def opt_sum_sqr(outs, ins, attrs, scratch, threads):
    """Return the calls of `opt_sum_sqr`."""
    g, places = ins
    blocks, sparse = count_blocks(g, places), SparseRows(g, places, g.shape[-1], places.size * g.shape[-1])
    buffers = scratch[8 * -(-blocks // LANES) * LANES :]
    each = sparse_square_blocks.call(
        sparse, scratch, buffers, items=blocks, block=choose_block(blocks, 2 * BLOCK)
    )
    return [each, add_up.call(scratch, outs[0], blocks, 1.0, items=1, block=1)]


@KernelEntry
def clip_by_norm(lo, hi, thread, factor: F32, norm: F32, limit: Real, count, *sums):
    """Compute the norm from `count` sums of squares, and the factor that clipping gives."""
    squares = 0.0
    for i in range(count):
        squares += f32(sums[i])[0]
    total_norm = math.sqrt(squares)
    norm[0] = total_norm
    factor[0] = min(1.0, limit / (total_norm + 1e-6)) if limit > 0 and total_norm < math.inf else 1.0


@kernel("clip_factor")
def clip_factor(outs, ins, attrs, scratch, threads):
    """Return the calls of `clip_factor`."""
    return [clip_by_norm.call(*outs, attrs["limit"], len(ins), *ins, items=1, block=1)]
