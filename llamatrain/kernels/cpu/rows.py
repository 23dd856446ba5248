"""Rows by their numbers: lookup, gradient, and replacement."""

import math

import numpy as np

from llamatrain.compiler.declare import F32, I32, KernelEntry, f32, u16
from llamatrain.compiler.vectors import LANES, load_until, splat, store_until
from llamatrain.kernels.cpu.chunking import choose_block, should_stream
from llamatrain.kernels.cpu.dequantize import decode
from llamatrain.kernels.cpu.pack import can_pack
from llamatrain.kernels.cpu.registry import kernel
from llamatrain.kernels.quantized import Blocks


@KernelEntry
def take_rows(lo, hi, thread, w, ids: I32, y: F32, width, is_half, row_count):
    """Copy the rows with ids lo to hi; an invalid id gives NaN."""
    wide, half = f32(w), u16(w)
    for row in range(lo, hi):
        source, start = ids[row] * width, row * width
        if not 0 <= ids[row] < row_count:  # visible in the loss; nothing is read out of bounds
            for i in range(0, width, LANES):
                store_until(y, start + i, start + width, splat(np.float32(np.nan)), 0)
            continue
        for i in range(0, width, LANES):
            v = (
                load_until(half, source + i, source + width)
                if is_half
                else load_until(wide, source + i, source + width)
            )
            store_until(y, start + i, start + width, v, 0)


@KernelEntry
def decode_rows_by_id(lo, hi, thread, kind, w, row_bytes, ids: I32, y, width, row_count):
    """Decode the rows with ids lo to hi; an invalid id gives NaN."""
    for row in range(lo, hi):
        if 0 <= ids[row] < row_count:
            decode(kind, y + row * width * 4, 0, w + ids[row] * row_bytes, width)
        else:
            for i in range(row * width, row * width + width, LANES):
                store_until(f32(y), i, row * width + width, splat(np.float32(np.nan)), 0)


def _takes_floats(outs, ins, attrs) -> bool:
    return outs[0].dtype == np.float32 and can_pack(ins[0])


@kernel("get_rows", takes=_takes_floats)
def get_rows(outs, ins, attrs, scratch, threads):
    """Return the calls of `get_rows`."""
    (w, ids), width = ins, ins[0].shape[1]
    taking = {"ids": ids, "y": outs[0], "width": width, "row_count": w.shape[0]}
    how = {"items": ids.size, "block": choose_block(ids.size, 2 * width)}
    if isinstance(w, Blocks):
        return [decode_rows_by_id.call(w.kind.number, w.raw, w.row_bytes, **taking, **how)]
    return [take_rows.call(w, is_half=w.dtype == np.uint16, **taking, **how)]


@KernelEntry
def add_to_rows(lo, hi, thread, dy: F32, ids: I32, out: F32, count, width, stream):
    """Compute rows lo to hi of the result: zeros plus the rows of dy with that number, in order."""
    for i in range(lo * width, hi * width, LANES):
        store_until(out, i, hi * width, splat(0.0), stream)
    for row in range(count):
        if lo <= ids[row] < hi:
            start, source = ids[row] * width, row * width
            for i in range(0, width, LANES):
                v = load_until(out, start + i, start + width) + load_until(dy, source + i, source + width)
                store_until(out, start + i, start + width, v, 0)


@kernel("get_rows_back")
def get_rows_back(outs, ins, attrs, scratch, threads):
    """Return the calls of `get_rows_back`."""
    (dy, ids), (out,) = ins, outs
    rows, width = out.shape
    block = choose_block(rows, width)  # few and large blocks: each scans all numbers
    return [
        add_to_rows.call(
            dy, ids, out, count=ids.size, width=width, stream=should_stream(out), items=rows, block=block
        )
    ]


@KernelEntry
def copy_words(lo, hi, thread, x: F32, y: F32, stream):
    """Copy words lo to hi."""
    for i in range(lo, hi, LANES):
        store_until(y, i, hi, load_until(x, i, hi), stream)


@KernelEntry
def put_rows(lo, hi, thread, rows: F32, ids: I32, y: F32, count, width, row_count):
    """Store columns lo to hi of all rows, in order: of duplicate numbers, the last row wins."""
    for row in range(count):
        if not 0 <= ids[row] < row_count:
            continue
        start, source = ids[row] * width, row * width
        for i in range(lo, hi, LANES):
            store_until(y, start + i, start + hi, load_until(rows, source + i, source + hi), 0)


def _takes_words(outs, ins, attrs) -> bool:
    width = math.prod(ins[1].shape[1:]) * ins[1].dtype.itemsize
    return outs[0].dtype == ins[0].dtype == ins[1].dtype and width % 4 == 0 and width > 0


@kernel("set_rows", takes=_takes_words)
def set_rows(outs, ins, attrs, scratch, threads):
    """Return the calls of `set_rows`."""
    (x, rows, ids), (y,) = ins, outs
    width = math.prod(rows.shape[1:]) * rows.itemsize // 4  # in words of 4 bytes of any type
    block = choose_block(width, ids.size, LANES)
    put = put_rows.call(rows, ids, y, count=ids.size, width=width, row_count=len(y), items=width, block=block)
    if x.ctypes.data == y.ctypes.data:
        return [put]
    return [
        copy_words.call(
            x, y, should_stream(y), items=x.nbytes // 4, block=choose_block(x.nbytes // 4, unit=LANES)
        ),
        put,
    ]
