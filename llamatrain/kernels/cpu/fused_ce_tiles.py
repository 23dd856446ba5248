"""The compiled parts of the fused loss (fused_ce.py): products and sums of slices, and finishing rows."""

import math
from typing import Any, NamedTuple

import numpy as np

from llamatrain.compiler.declare import F32, F64, I32, KernelEntry, Real, f32, inline, u16
from llamatrain.compiler.vectors import (
    LANES,
    exp,
    load,
    load_until,
    mask_range,
    reduce_sum,
    splat,
    store,
    store_until,
    to_bf16,
)
from llamatrain.kernels.cpu import tiles
from llamatrain.kernels.cpu.pack import Packed, Side, pack_part
from llamatrain.kernels.cpu.softcap import cap_flat, cap_slope
from llamatrain.kernels.cpu.softmax import row_max

ZERO = np.float32(0)


class Chunk(NamedTuple):
    """A chunk of tokens and its results.

    For each slice of the vocabulary, `width` wide, it holds the maximum and the sum of each row.
    """

    width: int
    rows: int
    half: int
    keeps_logits: int
    pitch: int
    logits: Any
    partial: F32
    chosen: F32
    targets: I32
    cap: Real


@inline
def store_exponentials(line, to, width, row_maximum, inverse):
    """Store exp(logit - maximum), times the cap's slope if there is a cap, and return the sum without it."""
    row_sum, whole = splat(ZERO), width // LANES * LANES
    for i in range(0, whole, LANES):
        value = exp(load(line, i) - row_maximum)
        row_sum += value
        store(to, i, value if inverse == ZERO else value * cap_slope(load(line, i), inverse))
    if whole < width:
        value = mask_range(exp(load_until(line, whole, width) - row_maximum), whole, 0, width, ZERO)
        row_sum += value
        kept = value if inverse == ZERO else value * cap_slope(load_until(line, whole, width), inverse)
        store_until(to, whole, width, kept, 0)
    return reduce_sum(row_sum)


@KernelEntry
def logits_slices(lo, hi, thread, side: Side, packed: Packed, own, chunk: Chunk):
    """Compute the logits of slices lo to hi, with their maxima and sums.

    The side is the weight, with a row for each of the vocabulary; a slice's logits lie at `own` in the
    thread's memory.
    """
    mode, width, rows, logits, targets = side.mode, chunk.width, chunk.rows, chunk.logits, chunk.targets
    mine = packed.own + thread * packed.thread_bytes
    made, decoding = mine + own, mine + packed.thread_bytes - packed.slab_bytes
    inverse = np.float32(1 / chunk.cap) if chunk.cap != 0 and chunk.keeps_logits else ZERO
    tiles.configure_tiles(mode)
    for item in range(lo, hi):
        first, whole = item * width, packed.memory
        columns = min(width, side.rows - first)
        for k0 in range(0, side.k, side.k_block):
            deep = min(side.k_block, side.k - k0)
            pack_part(side, mine, side.source, 1, first, columns, k0, deep, decoding)
            tiles.multiply(mode, made, width, whole, mine, rows, columns, deep, k0 > 0, 1)
            whole += tiles.panel_bytes(mode, rows, deep)
        for row in range(rows):
            line, place, at = f32(made + row * width * 4), row * chunk.pitch + first, (item * rows + row) * 2
            if chunk.cap != 0:
                cap_flat(line, line, 0, columns, 1.0, chunk.cap, 0)
            top = row_max(line, 0, columns)
            if first <= targets[row] < first + columns:
                chunk.chosen[row] = line[targets[row] - first]
            if chunk.keeps_logits and chunk.half:
                rest = store_exponentials(line, u16(logits + place * 2), columns, top, inverse)
            else:
                rest = store_exponentials(
                    line, f32(logits + place * 4) if chunk.keeps_logits else line, columns, top, inverse
                )
            chunk.partial[at], chunk.partial[at + 1] = top, rest
    tiles.release_tiles(mode)


@inline
def log_sum_exp(partial, row, rows, slices):
    """Return the log of a row's sum of exponentials, from those of its slices."""
    top, so_far = partial[row * 2], 0.0
    for item in range(slices):
        top = max(top, partial[(item * rows + row) * 2])
    for item in range(slices):
        at = (item * rows + row) * 2
        so_far += partial[at + 1] * math.exp(partial[at] - top)
    return top + math.log(so_far)


@KernelEntry
def mark_correct_rows(lo, hi, thread, chunk: Chunk, weights: F32, right: F64, v, slices):
    """Store 1 for rows whose target has the largest logit, else 0."""
    partial, chosen, targets, rows = chunk.partial, chunk.chosen, chunk.targets, chunk.rows
    for row in range(lo, hi):
        right[row] = partial[row * 2]
    for item in range(1, slices):
        for row in range(lo, hi):
            right[row] = max(right[row], partial[(item * rows + row) * 2])
    for row in range(lo, hi):
        judged = weights[row] != 0 and 0 <= targets[row] < v
        right[row] = 1.0 if judged and chosen[row] >= right[row] else 0.0


@inline
def scale_slice(line, first, end, factor):
    """Multiply a slice of a row by a factor."""
    for i in range(first, end, LANES):
        store_until(line, i, end, load_until(line, i, end) * factor if factor != 0 else splat(ZERO), 0)


@KernelEntry
def finish_rows(lo, hi, thread, chunk: Chunk, weights: F32, dloss: F32, losses: F64, v, slices):
    """Store the losses of rows lo to hi and scale their logits to the gradient."""
    partial, chosen, targets = chunk.partial, chunk.chosen, chunk.targets
    width = chunk.width
    rows = chunk.rows
    half = chunk.half
    keeps = chunk.keeps_logits
    pitch = chunk.pitch
    logits = chunk.logits
    for row in range(lo, hi):
        target = targets[row] if weights[row] != 0 else -1
        log_sum = log_sum_exp(partial, row, rows, slices)
        losses[row] = weights[row] * (log_sum - chosen[row]) if target >= 0 else 0.0
        if target >= v:  # visible in the loss; nothing is written out of bounds
            losses[row], target = math.nan, -1
        factor = weights[row] * dloss[0] if target >= 0 else ZERO
        here = logits + row * pitch * (2 if half else 4)
        at_target = factor * np.float32(math.exp(chosen[row] - log_sum) - 1)
        if chunk.cap != 0:
            at_target *= cap_slope(chosen[row], np.float32(1 / chunk.cap))
        for item in range(slices if keeps else 0):
            first, relative = item * width, np.float32(partial[(item * rows + row) * 2] - log_sum)
            scale = factor * exp(relative) if target >= 0 else ZERO
            if half:
                scale_slice(u16(here), first, min(v, first + width), scale)
            else:
                scale_slice(f32(here), first, min(v, first + width), scale)
        if keeps and target >= 0 and half:
            u16(here)[target] = to_bf16(at_target)
        elif keeps and target >= 0:
            f32(here)[target] = at_target
