"""Sums of all elements: float32 vectors over fixed blocks, and the blocks' sums in float64, in order."""

from collections.abc import Sequence

import numpy as np

from llamatrain.compiler.declare import F32, F64, KernelEntry, Real
from llamatrain.compiler.vectors import LANES, load_until, reduce_sum, splat, store_until
from llamatrain.kernels.cpu.chunking import choose_block
from llamatrain.kernels.cpu.norm import add_rows, choose_chunk, dot
from llamatrain.kernels.cpu.registry import Array, kernel

BLOCK = 8192


@KernelEntry
def sum_blocks(lo, hi, thread, x: F32, sums: F64, size):
    """Sum the elements of blocks lo to hi."""
    for block in range(lo, hi):
        start, end = block * BLOCK, min(size, (block + 1) * BLOCK)
        even, odd = splat(0.0), splat(0.0)
        for i in range(start, end, 2 * LANES):
            even += load_until(x, i, end)
            odd += load_until(x, i + LANES, end)
        sums[block] = reduce_sum(even + odd)


@KernelEntry
def square_blocks(lo, hi, thread, x: F32, sums: F64, size):
    """Sum the squares of blocks lo to hi."""
    for block in range(lo, hi):
        sums[block] = dot(x, block * BLOCK, x, block * BLOCK, min(BLOCK, size - block * BLOCK))


@KernelEntry
def add_up(lo, hi, thread, sums: F64, out: F32, count, factor: Real):
    """Sum the blocks' sums, times a factor."""
    so_far = 0.0
    for i in range(count):
        so_far += sums[i]
    out[0] = np.float32(so_far * factor)


def block_sum_calls(entry, x, out, scratch, factor=1.0):
    """Return the calls of a sum over blocks."""
    blocks = -(-x.size // BLOCK)
    each = entry.call(x, scratch, x.size, items=blocks, block=choose_block(blocks, BLOCK))
    return [each, add_up.call(scratch, out, blocks, factor, items=1, block=1)]


def block_sum_bytes(outs, ins, attrs, threads):
    """Return the bytes of the blocks' sums."""
    return 8 * -(-int(np.prod(ins[0].shape, dtype=np.int64)) // BLOCK)


@kernel("sum", scratch=block_sum_bytes)
def sum_all(outs, ins, attrs, scratch, threads):
    """Return the calls of `sum`."""
    return block_sum_calls(sum_blocks, ins[0], outs[0], scratch)


@kernel("mean", scratch=block_sum_bytes)
def mean(outs, ins, attrs, scratch, threads):
    """Return the calls of `mean`."""
    return block_sum_calls(sum_blocks, ins[0], outs[0], scratch, 1 / ins[0].size)


@kernel("sum_sqr", scratch=block_sum_bytes)
def sum_sqr(outs, ins, attrs, scratch, threads):
    """Return the calls of `sum_sqr`."""
    return block_sum_calls(square_blocks, ins[0], outs[0], scratch)


# ---- sums of rows, as a bias' gradient is: by chunks of rows first ---------------------------------


@KernelEntry
def sum_chunk(lo, hi, thread, x: F32, sums: F32, width, chunk):
    """Sum the rows lo to hi, a chunk."""
    to = lo // chunk * width
    for i in range(0, width, LANES):
        column = splat(0.0)
        for row in range(lo, hi):
            column += load_until(x, row * width + i, row * width + width)
        store_until(sums, to + i, to + width, column, 0)


def _takes_one_row(outs: Sequence[Array], ins: Sequence[Array], attrs: dict) -> bool:
    (y,), (x,) = outs, ins
    return y.dtype == np.float32 and len(y.shape) > 0 and y.size == y.shape[-1] == x.shape[-1]


def row_chunk_bytes(outs, ins, attrs, threads):
    """Return the bytes of the chunks' sums."""
    rows = ins[0].size // outs[0].size
    return 4 * outs[0].size * -(-rows // choose_chunk(rows))


@kernel("repeat_back", scratch=row_chunk_bytes, takes=_takes_one_row)
def repeat_back(outs, ins, attrs, scratch, threads):
    """Return the calls of `repeat_back`."""
    (x,), (y,) = ins, outs
    width, rows = y.size, x.size // y.size
    chunk = choose_chunk(rows)
    chunks = -(-rows // chunk)
    each = sum_chunk.call(x, scratch, width, chunk, items=rows, block=chunk)
    return [
        each,
        add_rows.call(
            scratch, y, rows=chunks, width=width, items=width, block=choose_block(width, chunks, LANES)
        ),
    ]
