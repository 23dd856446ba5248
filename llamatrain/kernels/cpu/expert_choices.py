"""Choice of experts for each row, and movement between rows and choices sorted by expert (graph/ops/experts.py)."""

import numpy as np

from llamatrain.compiler.declare import F32, I32, KernelEntry, inline
from llamatrain.compiler.vectors import LANES, load_until, reduce_sum, splat, store_until
from llamatrain.kernels.cpu.chunking import choose_block, should_stream
from llamatrain.kernels.cpu.norm import dot
from llamatrain.kernels.cpu.registry import all_float32, kernel

MINUS_INF = np.float32(-np.inf)
TINY = np.float32(1e-20)  # added to sums that divide

# ---- which experts -----------------------------------------------------------------------------


@inline
def rank_of(x):
    """Return a score by which columns are compared: NaN is the smallest."""
    return x if x == x else MINUS_INF


@KernelEntry
def choose_largest(lo, hi, thread, scores: F32, ids: I32, columns, k):
    """Find the columns of the k largest scores of rows lo to hi, by inserting each into a sorted list."""
    for row in range(lo, hi):
        source, list_start = row * columns, row * k
        for column in range(columns):
            score, place = rank_of(scores[source + column]), min(column, k)
            while place > 0 and rank_of(scores[source + ids[list_start + place - 1]]) < score:
                if place < k:
                    ids[list_start + place] = ids[list_start + place - 1]
                place -= 1
            if place < k:
                ids[list_start + place] = column


def _has_one_group(outs, ins, attrs) -> bool:
    return all_float32(outs, ins, attrs) and attrs.get("groups", 1) == 1


@kernel("top_k", takes=_has_one_group)
def top_k(outs, ins, attrs, scratch, threads):
    """Return the calls of `top_k`."""
    (scores,), (ids,) = ins, outs
    rows, columns = scores.shape
    block = choose_block(rows, 4 * columns)
    return [choose_largest.call(scores, ids, columns, ids.shape[1], items=rows, block=block)]


@KernelEntry
def take_by_column(lo, hi, thread, x: F32, ids: I32, y: F32, columns, k):
    """Copy elements of rows lo to hi by their columns."""
    for row in range(lo, hi):
        for i in range(row * k, row * k + k):
            y[i] = x[row * columns + ids[i]]


@kernel("take_columns")
def take_columns(outs, ins, attrs, scratch, threads):
    """Return the calls of `take_columns`."""
    (x, ids), (y,) = ins, outs
    rows, k = ids.shape
    return [take_by_column.call(x, ids, y, x.shape[1], k, items=rows, block=choose_block(rows, 4 * k))]


@KernelEntry
def put_by_column(lo, hi, thread, y: F32, ids: I32, x: F32, columns, k):
    """Add elements at their columns to rows lo to hi of zeros."""
    for i in range(lo * columns, hi * columns):
        x[i] = np.float32(0)
    for row in range(lo, hi):
        for i in range(row * k, row * k + k):
            x[row * columns + ids[i]] += y[i]


@kernel("put_columns")
def put_columns(outs, ins, attrs, scratch, threads):
    """Return the calls of `put_columns`."""
    (y, ids), (x,) = ins, outs
    rows, columns = x.shape
    block = choose_block(rows, columns)
    return [put_by_column.call(y, ids, x, columns, ids.shape[1], items=rows, block=block)]


@inline
def row_divisor(x, start, end):
    """Return what `normalize_rows` divides a row by."""
    so_far = splat(0.0)
    for i in range(start, end, LANES):
        so_far += load_until(x, i, end)
    return reduce_sum(so_far) + TINY


@KernelEntry
def divide_by_sums(lo, hi, thread, x: F32, y: F32, width):
    """Divide rows lo to hi by their sums."""
    for row in range(lo, hi):
        start, end = row * width, (row + 1) * width
        by = splat(row_divisor(x, start, end))
        for i in range(start, end, LANES):
            store_until(y, i, end, load_until(x, i, end) / by, 0)


@kernel("normalize_rows")
def normalize_rows(outs, ins, attrs, scratch, threads):
    """Return the calls of `normalize_rows`."""
    (x,), width = ins, ins[0].shape[-1]
    rows = x.size // width
    return [divide_by_sums.call(x, outs[0], width, items=rows, block=choose_block(rows, 2 * width))]


@KernelEntry
def divide_by_sums_back(lo, hi, thread, dy: F32, x: F32, dx: F32, width):
    """Compute the gradient of `normalize_rows` for rows lo to hi."""
    for row in range(lo, hi):
        start, end = row * width, (row + 1) * width
        by = row_divisor(x, start, end)
        shared, divisor = splat(dot(dy, start, x, start, width) / by), splat(by)
        for i in range(start, end, LANES):
            store_until(dx, i, end, (load_until(dy, i, end) - shared) / divisor, 0)


@kernel("normalize_rows_back")
def normalize_rows_back(outs, ins, attrs, scratch, threads):
    """Return the calls of `normalize_rows_back`."""
    (dy, x), width = ins, ins[0].shape[-1]
    rows = x.size // width
    return [divide_by_sums_back.call(dy, x, outs[0], width, items=rows, block=choose_block(rows, 4 * width))]


# ---- the order of choices ----------------------------------------------------------------------


@KernelEntry
def count_and_place(lo, hi, thread, ids: I32, order: I32, expert: I32, ends: I32, choices, experts):
    """Sort choices by counting those of each expert; `ends` has where the next one of each goes, at last its end."""
    for each in range(experts):
        ends[each] = 0
    for choice in range(choices):
        if ids[choice] + 1 < experts:
            ends[ids[choice] + 1] += 1
    for each in range(1, experts):
        ends[each] += ends[each - 1]
    for choice in range(choices):
        place = ends[ids[choice]]
        order[place], expert[place] = choice, ids[choice]
        ends[ids[choice]] = place + 1


@kernel("sort_choices")
def sort_choices(outs, ins, attrs, scratch, threads):
    """Return the call of `sort_choices`."""
    (ids,), (order, expert, ends) = ins, outs
    return [count_and_place.call(ids, order, expert, ends, ids.size, ends.size, items=1, block=1)]


@KernelEntry
def take_numbers(lo, hi, thread, x: F32, order: I32, y: F32):
    """Copy the numbers of choices to places lo to hi."""
    for place in range(lo, hi):
        y[place] = x[order[place]]


@kernel("take_choices")
def take_choices(outs, ins, attrs, scratch, threads):
    """Return the calls of `take_choices`."""
    x, order = ins
    return [take_numbers.call(x, order, outs[0], items=x.size, block=choose_block(x.size))]


@KernelEntry
def put_numbers(lo, hi, thread, y: F32, order: I32, x: F32):
    """Copy numbers from places lo to hi to their choices."""
    for place in range(lo, hi):
        x[order[place]] = y[place]


@kernel("put_choices")
def put_choices(outs, ins, attrs, scratch, threads):
    """Return the calls of `put_choices`."""
    y, order = ins
    return [put_numbers.call(y, order, outs[0], items=y.size, block=choose_block(y.size))]


@KernelEntry
def find_places(lo, hi, thread, order: I32, places: I32, found: I32, rows, k):
    """List the places of each row's choices in sorted order."""
    for row in range(rows):
        found[row] = 0
    for place in range(rows * k):
        row = order[place] // k
        places[row * k + found[row]] = place
        found[row] += 1


@KernelEntry
def add_choices(lo, hi, thread, y: F32, places: I32, x: F32, k, width):
    """Add up the choices of rows lo to hi."""
    for row in range(lo, hi):
        start, end = row * width, (row + 1) * width
        for i in range(0, width, LANES):
            total = splat(0.0)
            for j in range(row * k, (row + 1) * k):
                source = places[j] * width
                total += load_until(y, source + i, source + width)
            store_until(x, start + i, end, total, 0)


def _places_bytes(outs, ins, attrs, threads) -> int:
    rows, k = ins[1].shape
    return 4 * rows * (k + 1)


@kernel("sum_choices", _places_bytes)
def sum_choices(outs, ins, attrs, scratch, threads):
    """Return the calls of `sum_choices`."""
    (y, order), (x,) = ins, outs
    (rows, k), width = order.shape, x.shape[1]
    places, found = scratch[: 4 * rows * k], scratch[4 * rows * k :]
    return [
        find_places.call(order, places, found, rows, k, items=1, block=1),
        add_choices.call(y, places, x, k, width, items=rows, block=choose_block(rows, (k + 1) * width)),
    ]


@KernelEntry
def copy_to_choices(lo, hi, thread, x: F32, order: I32, y: F32, k, width, stream):
    """Copy the rows of places lo to hi."""
    for place in range(lo, hi):
        source, start = order[place] // k * width, place * width
        for i in range(0, width, LANES):
            store_until(y, start + i, start + width, load_until(x, source + i, source + width), stream)


@kernel("spread_rows")
def spread_rows(outs, ins, attrs, scratch, threads):
    """Return the calls of `spread_rows`."""
    (x, order), (y,) = ins, outs
    width, block = x.shape[1], choose_block(order.size, 2 * x.shape[1])
    stream = should_stream(y)
    return [copy_to_choices.call(x, order, y, order.shape[1], width, stream, items=order.size, block=block)]


# ---- a number for each row ---------------------------------------------------------------------


@KernelEntry
def scale_each(lo, hi, thread, x: F32, by: F32, y: F32, width):
    """Multiply rows lo to hi by their numbers."""
    for row in range(lo, hi):
        factor, end = by[row], (row + 1) * width
        for i in range(row * width, end, LANES):
            store_until(y, i, end, load_until(x, i, end) * factor, 0)


@kernel("scale_rows")
def scale_rows(outs, ins, attrs, scratch, threads):
    """Return the calls of `scale_rows`."""
    (x, by), width = ins, ins[0].shape[-1]
    block = choose_block(by.size, 2 * width)
    return [scale_each.call(x, by, outs[0], width, items=by.size, block=block)]


@KernelEntry
def dot_each(lo, hi, thread, a: F32, b: F32, y: F32, width):
    """Compute the dot products of rows lo to hi."""
    for row in range(lo, hi):
        y[row] = dot(a, row * width, b, row * width, width)


@kernel("dot_rows")
def dot_rows(outs, ins, attrs, scratch, threads):
    """Return the calls of `dot_rows`."""
    (a, b), width, (y,) = ins, ins[0].shape[-1], outs
    return [dot_each.call(a, b, y, width, items=y.size, block=choose_block(y.size, 2 * width))]
