"""Arithmetic of two arrays with the common kinds of broadcasting, casts, and copies."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from llamatrain.compiler.declare import F32, U16, KernelEntry, Real, inline
from llamatrain.compiler.vectors import LANES, load_until, splat, store_until
from llamatrain.kernels.cpu.chunking import choose_block, should_stream
from llamatrain.kernels.cpu.registry import Array, kernel

ADD, SUB, MUL, DIV = range(4)


@inline
def load_operand(x, row, column, end, down, along):
    """Load a vector of an operand; a broadcast column is repeated."""
    return load_until(x, row * down + column, row * down + end) if along else splat(x[row * down])


@KernelEntry
def combine(lo, hi, thread, x: F32, y: F32, out: F32, how, width, stream, x_down, x_along, y_down, y_along):
    """Combine elements lo to hi of rows of `width`.

    An operand advances by `down` for each row, and by `along` (1 or 0) for each column.
    """
    for row in range(lo // width, (hi + width - 1) // width):
        first, end = max(0, lo - row * width), min(width, hi - row * width)
        for i in range(first, end, LANES):
            left = load_operand(x, row, i, end, x_down, x_along)
            right = load_operand(y, row, i, end, y_down, y_along)
            if how == ADD:
                result = left + right
            elif how == SUB:
                result = left - right
            elif how == MUL:
                result = left * right
            else:
                result = left / right
            store_until(out, row * width + i, row * width + end, result, stream)


def split_broadcast(
    shape: tuple[int, ...], *operands: tuple[int, ...]
) -> tuple[int, list[tuple[int, int]]] | None:
    """Return the result's row width and (down, along) of each operand, or None if this cannot express it."""
    padded = [(1,) * (len(shape) - len(each)) + tuple(each) for each in operands]
    moving = [tuple(each[axis] != 1 for each in padded) for axis in range(len(shape)) if shape[axis] != 1]
    sizes = iter(size for size in shape if size != 1)
    groups = [
        (moves, int(np.prod([next(sizes) for _ in run], dtype=np.int64))) for moves, run in groupby(moving)
    ]
    if len(groups) > 2:
        return None
    every = (True,) * len(operands)
    (rows_move, _), (moves, width) = [(every, 1), (every, 1), *groups][-2:]
    return width, [
        ((width if along else 1) if down else 0, int(along))
        for down, along in zip(rows_move, moves, strict=True)
    ]


def _takes_broadcast(outs: Sequence[Array], ins: Sequence[Array], attrs: dict) -> bool:
    floats = all(each.dtype == np.float32 for each in (*outs, *ins))
    return floats and split_broadcast(outs[0].shape, *(each.shape for each in ins)) is not None


def binary_calls(how, out, x, y):
    """Return the call that combines two arrays."""
    split = split_broadcast(out.shape, x.shape, y.shape)
    assert split is not None  # checked by _takes_broadcast
    width, ((x_down, x_along), (y_down, y_along)) = split
    stream = width % LANES == 0 and should_stream(out.reshape(-1), x, y)
    moves = {"x_down": x_down, "x_along": x_along, "y_down": y_down, "y_along": y_along}
    block = choose_block(out.size, unit=LANES)
    return [
        combine.call(x, y, out, how=how, width=width, stream=stream, **moves, items=out.size, block=block)
    ]


for _name, _how in (("add", ADD), ("sub", SUB), ("mul", MUL), ("div", DIV)):

    @kernel(_name, takes=_takes_broadcast)
    def arithmetic(outs, ins, attrs, scratch, threads, how=_how):
        """Bind the operation to its arrays."""
        return binary_calls(how, outs[0], *ins)


@kernel("scale")
def scale(outs, ins, attrs, scratch, threads):
    """Return the calls of `scale`."""
    return binary_calls(MUL, outs[0], ins[0], np.full((), attrs["by"], np.float32))


@kernel("sqr")
def sqr(outs, ins, attrs, scratch, threads):
    """Return the calls of `sqr`."""
    return binary_calls(MUL, outs[0], ins[0], ins[0])


def _covers_all(outs: Sequence[Array], ins: Sequence[Array], attrs: dict) -> bool:
    whole = tuple((0, size, 1) for size in ins[0].shape)
    return outs[0].dtype == np.float32 and tuple(attrs["slices"]) == whole


@kernel("acc", takes=_covers_all)
def acc(outs, ins, attrs, scratch, threads):
    """Return the call that adds y to all of x, as gradients are over micro-batches."""
    return binary_calls(ADD, outs[0], *ins)


@KernelEntry
def fill_flat(lo, hi, thread, out: F32, value: Real):
    """Fill elements lo to hi."""
    everywhere = splat(np.float32(value))
    for i in range(lo, hi, LANES):
        store_until(out, i, hi, everywhere, 0)


@kernel("fill")
def fill(outs, ins, attrs, scratch, threads):
    """Return the calls of `fill`."""
    return [
        fill_flat.call(
            outs[0], float(attrs["value"]), items=outs[0].size, block=choose_block(outs[0].size, unit=LANES)
        )
    ]


# ---- casts and copies ---------------------------------------------------------


@KernelEntry
def to_bf16_flat(lo, hi, thread, x: F32, y: U16, stream):
    """Round elements lo to hi to bf16."""
    for i in range(lo, hi, LANES):
        store_until(y, i, hi, load_until(x, i, hi), stream)


@KernelEntry
def from_bf16_flat(lo, hi, thread, x: U16, y: F32, stream):
    """Convert elements lo to hi to float32."""
    for i in range(lo, hi, LANES):
        store_until(y, i, hi, load_until(x, i, hi), stream)


def _takes_bf16_cast(outs: Sequence[Array], ins: Sequence[Array], attrs: dict) -> bool:
    return {outs[0].dtype, ins[0].dtype} == {np.dtype(np.float32), np.dtype(np.uint16)}


@kernel("cast", takes=_takes_bf16_cast)
def cast(outs, ins, attrs, scratch, threads):
    """Return the calls of `cast`."""
    (x,), (y,) = ins, outs
    stream = should_stream(y.reshape(-1), x)
    return [
        (to_bf16_flat if x.dtype == np.float32 else from_bf16_flat).call(
            x, y, stream, items=x.size, block=choose_block(x.size, unit=LANES)
        )
    ]
