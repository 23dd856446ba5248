"""Softmax over the last axis and its gradient, and the cross entropy of rows of logits."""

import math

import numpy as np

from llamatrain.compiler.declare import F32, F64, I32, KernelEntry, inline
from llamatrain.compiler.vectors import (
    LANES,
    exp,
    load_until,
    mask_range,
    maximum,
    reduce_max,
    reduce_sum,
    splat,
    store_until,
    where_nonzero,
)
from llamatrain.kernels.cpu.chunking import choose_block
from llamatrain.kernels.cpu.norm import dot
from llamatrain.kernels.cpu.reduce import add_up
from llamatrain.kernels.cpu.registry import kernel

MINUS_INF = np.float32(-np.inf)
ONE = np.float32(1)


@inline
def row_max(x, start, end):
    """Return the largest element of a row. NaN is skipped and appears in the sum."""
    top = splat(MINUS_INF)
    for i in range(start, end, LANES):
        top = maximum(mask_range(load_until(x, i, end), i, start, end, MINUS_INF), top)
    return reduce_max(top)


@inline
def sum_exp(x, start, end, top):
    """Return the sum of exp(x - top) over a row."""
    so_far = splat(0.0)
    for i in range(start, end, LANES):
        so_far += mask_range(exp(load_until(x, i, end) - top), i, start, end, np.float32(0))
    return reduce_sum(so_far)


@inline
def soft_max_row(x, y, start, end, factor):
    """Compute y = factor softmax(x) for a row."""
    top, so_far = row_max(x, start, end), splat(0.0)
    for i in range(start, end, LANES):
        e = mask_range(exp(load_until(x, i, end) - top), i, start, end, np.float32(0))
        so_far += e
        store_until(y, i, end, e, 0)
    scale = factor / reduce_sum(so_far)
    for i in range(start, end, LANES):
        store_until(y, i, end, load_until(y, i, end) * scale, 0)


@KernelEntry
def soft_max_rows(lo, hi, thread, x: F32, y: F32, width):
    """Compute the softmax of rows lo to hi."""
    for row in range(lo, hi):
        soft_max_row(x, y, row * width, (row + 1) * width, ONE)


@KernelEntry
def soft_max_rows_back(lo, hi, thread, dy: F32, y: F32, dx: F32, width):
    """Compute the gradient of the softmax for rows lo to hi."""
    for row in range(lo, hi):
        start, end = row * width, (row + 1) * width
        shared = dot(dy, start, y, start, width)
        for i in range(start, end, LANES):
            store_until(dx, i, end, load_until(y, i, end) * (load_until(dy, i, end) - shared), 0)


@kernel("soft_max")
def soft_max(outs, ins, attrs, scratch, threads):
    """Return the calls of `soft_max`."""
    (x,), width = ins, ins[0].shape[-1]
    return [
        soft_max_rows.call(
            x, outs[0], width, items=x.size // width, block=choose_block(x.size // width, 8 * width)
        )
    ]


@kernel("soft_max_back")
def soft_max_back(outs, ins, attrs, scratch, threads):
    """Return the calls of `soft_max_back`."""
    (dy, y), width = ins, ins[0].shape[-1]
    return [
        soft_max_rows_back.call(
            dy, y, outs[0], width, items=y.size // width, block=choose_block(y.size // width, 4 * width)
        )
    ]


# ---- cross entropy: the sum over rows of weight (log(sum(exp(x))) - x[target]) ----


@KernelEntry
def cross_entropy_ids(lo, hi, thread, x: F32, targets: I32, weights: F32, sums: F64, width, rows):
    """Sum the weighted losses of rows lo to hi, with ids as targets."""
    so_far = 0.0
    for row in range(lo, hi):
        if targets[row] >= 0:
            start = row * width
            top = row_max(x, start, start + width)
            log_sum = top + math.log(sum_exp(x, start, start + width, top))
            chosen = x[start + targets[row]] if targets[row] < width else np.float32(np.nan)
            so_far += weights[row] * (log_sum - chosen)
    sums[lo // rows] = so_far


@KernelEntry
def cross_entropy_each_row(lo, hi, thread, x: F32, targets: I32, out: F32, width):
    """Store the loss of each of the rows lo to hi."""
    for row in range(lo, hi):
        start, out[row] = row * width, 0
        if targets[row] >= 0:
            top = row_max(x, start, start + width)
            chosen = x[start + targets[row]] if targets[row] < width else np.float32(np.nan)
            out[row] = np.float32(top + math.log(sum_exp(x, start, start + width, top)) - chosen)


@KernelEntry
def scale_by_weights(lo, hi, thread, losses: F32, weights: F32):
    """Multiply the losses of rows lo to hi by their weights."""
    for row in range(lo, hi):
        losses[row] = losses[row] * weights[row] if weights[row] != 0 else np.float32(0)


@KernelEntry
def count_correct(lo, hi, thread, x: F32, targets: I32, weights: F32, sums: F64, width, rows):
    """Count the weighted rows lo to hi whose target has the largest logit."""
    right = 0
    for row in range(lo, hi):
        if weights[row] != 0 and 0 <= targets[row] < width:
            right += x[row * width + targets[row]] >= row_max(x, row * width, (row + 1) * width)
    sums[lo // rows] = right


@KernelEntry
def cross_entropy_distributions(lo, hi, thread, x: F32, targets: F32, weights: F32, sums: F64, width, rows):
    """Sum the weighted losses of rows lo to hi, with distributions as targets."""
    so_far = 0.0
    for row in range(lo, hi):
        start, end = row * width, (row + 1) * width
        top = row_max(x, start, end)
        log_sum = np.float32(top + math.log(sum_exp(x, start, end, top)))
        each = splat(0.0)
        for i in range(start, end, LANES):
            share = load_until(targets, i, end)
            each += where_nonzero(
                share, splat(0.0), share * (log_sum - load_until(x, i, end))
            )  # 0 times infinity counts as 0
        so_far += weights[row] * reduce_sum(each)
    sums[lo // rows] = so_far


@KernelEntry
def cross_entropy_ids_back(lo, hi, thread, dloss: F32, x: F32, targets: I32, weights: F32, dx: F32, width):
    """Compute the gradient of the logits of rows lo to hi, with ids as targets."""
    for row in range(lo, hi):
        start, end = row * width, (row + 1) * width
        if targets[row] >= 0:
            factor = dloss[0] * weights[row]
            soft_max_row(x, dx, start, end, factor)
            if targets[row] < width:
                dx[start + targets[row]] -= factor
        else:
            for i in range(start, end, LANES):
                store_until(dx, i, end, splat(0.0), 0)


@KernelEntry
def cross_entropy_distributions_back(
    lo, hi, thread, dloss: F32, x: F32, targets: F32, weights: F32, dx: F32, width
):
    """Compute the gradient of the logits of rows lo to hi, with distributions as targets."""
    for row in range(lo, hi):
        start, end = row * width, (row + 1) * width
        factor, mass = dloss[0] * weights[row], splat(0.0)
        for i in range(start, end, LANES):
            mass += load_until(targets, i, end)
        soft_max_row(x, dx, start, end, factor * reduce_sum(mass))
        for i in range(start, end, LANES):
            store_until(dx, i, end, load_until(dx, i, end) - load_until(targets, i, end) * factor, 0)


def choose_rows(logits) -> int:
    """Return the rows of a block."""
    return choose_block(logits.shape[0], 8 * logits.shape[1])


def row_sum_bytes(outs, ins, attrs, threads):
    """Return the bytes of the blocks' sums."""
    return 8 * -(-ins[0].shape[0] // choose_rows(ins[0]))


@kernel("cross_entropy_loss", scratch=row_sum_bytes)
def cross_entropy_loss(outs, ins, attrs, scratch, threads):
    """Return the calls of `cross_entropy_loss`."""
    logits, targets, weights = ins
    (rows, width), block = logits.shape, choose_rows(logits)
    entry = cross_entropy_ids if targets.dtype == np.int32 else cross_entropy_distributions
    each = entry.call(logits, targets, weights, scratch, width=width, rows=block, items=rows, block=block)
    return [each, add_up.call(scratch, outs[0], -(-rows // block), 1.0, items=1, block=1)]


@kernel("cross_entropy_rows")
def cross_entropy_rows(outs, ins, attrs, scratch, threads):
    """Return the calls of `cross_entropy_rows`."""
    logits, targets = ins
    return [
        cross_entropy_each_row.call(
            logits, targets, outs[0], logits.shape[1], items=logits.shape[0], block=choose_rows(logits)
        )
    ]


@kernel("cross_entropy_judged", scratch=row_sum_bytes)
def cross_entropy_judged(outs, ins, attrs, scratch, threads):
    """Return the calls of `cross_entropy_judged`."""
    logits, targets, weights = ins
    (rows, width), block = logits.shape, choose_rows(logits)
    each = count_correct.call(
        logits, targets, weights, scratch, width=width, rows=block, items=rows, block=block
    )
    right = [each, add_up.call(scratch, outs[1], -(-rows // block), 1.0, items=1, block=1)]
    parts = [*cross_entropy_rows(outs[2:], ins[:2], attrs, scratch, threads)]
    parts.append(scale_by_weights.call(outs[2], weights, items=rows, block=choose_block(rows)))
    return [*cross_entropy_loss(outs[:1], ins, attrs, scratch, threads), *right, *parts]


@kernel("cross_entropy_loss_back")
def cross_entropy_loss_back(outs, ins, attrs, scratch, threads):
    """Return the calls of `cross_entropy_loss_back`."""
    _, logits, targets, _ = ins
    entry = cross_entropy_ids_back if targets.dtype == np.int32 else cross_entropy_distributions_back
    return [entry.call(*ins, outs[0], logits.shape[1], items=logits.shape[0], block=choose_rows(logits))]
