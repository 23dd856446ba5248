"""Activations without a gate: squared ReLU, xIELU, and gradients.

xIELU is positive x² + beta x above 0, and negative (exp(min(x, eps)) - 1 - x) + beta x elsewhere.
"""

import numpy as np

from llamatrain.compiler.declare import F32, KernelEntry, Real, inline
from llamatrain.compiler.vectors import (
    LANES,
    exp,
    load_until,
    maximum,
    splat,
    store_until,
    tanh,
    where_between,
)
from llamatrain.kernels.cpu.chunking import choose_block, should_stream
from llamatrain.kernels.cpu.registry import kernel

ONE, TWO, HALF = (np.float32(each) for each in (1, 2, 0.5))
TINY = np.finfo(np.float32).tiny  # the smallest normal number above 0


@KernelEntry
def relu_sqr_flat(lo, hi, thread, x: F32, y: F32, stream):
    """Compute the squared ReLU of elements lo to hi."""
    for i in range(lo, hi, LANES):
        v = maximum(load_until(x, i, hi), splat(0.0))
        store_until(y, i, hi, v * v, stream)


@KernelEntry
def relu_sqr_back_flat(lo, hi, thread, dy: F32, x: F32, dx: F32, stream):
    """Compute the gradient of the squared ReLU for elements lo to hi."""
    for i in range(lo, hi, LANES):
        v = maximum(load_until(x, i, hi), splat(0.0))
        store_until(dx, i, hi, load_until(dy, i, hi) * v * TWO, stream)


@inline
def where_below(x, limit, below, above):
    """Return `below` in the lanes where x < limit, `above` in the rest."""
    return where_between(below, x, splat(-np.inf), splat(limit), above)


@inline
def expm1_negative(x):
    """Return exp(x) - 1 of numbers up to 0, without cancellation."""
    t = tanh(x * HALF)
    return t * TWO / (ONE - t)


@KernelEntry
def xielu_flat(lo, hi, thread, x: F32, y: F32, positive: Real, negative: Real, beta: Real, eps: Real, stream):
    """Compute xIELU of elements lo to hi."""
    p, n, b, e = np.float32(positive), np.float32(negative), np.float32(beta), np.float32(eps)
    for i in range(lo, hi, LANES):
        v = load_until(x, i, hi)
        bent = (expm1_negative(where_below(v, e, v, splat(e))) - v) * n
        store_until(y, i, hi, where_below(v, TINY, bent, v * v * p) + v * b, stream)


@KernelEntry
def xielu_back_flat(
    lo, hi, thread, dy: F32, x: F32, dx: F32, positive: Real, negative: Real, beta: Real, eps: Real, stream
):
    """Compute the gradient of xIELU for elements lo to hi."""
    p, n, b, e = np.float32(2 * positive), np.float32(negative), np.float32(beta), np.float32(eps)
    for i in range(lo, hi, LANES):
        v = load_until(x, i, hi)
        bent = (where_below(v, e, exp(v), splat(0.0)) - ONE) * n
        slope = where_below(v, TINY, bent, v * p) + b
        store_until(dx, i, hi, load_until(dy, i, hi) * slope, stream)


ENTRIES = {
    "relu_sqr": relu_sqr_flat,
    "relu_sqr_back": relu_sqr_back_flat,
    "xielu": xielu_flat,
    "xielu_back": xielu_back_flat,
}
for _name, _entry in ENTRIES.items():

    @kernel(_name)
    def activation(outs, ins, attrs, scratch, threads, entry=_entry):
        """Return the call of an activation or its gradient."""
        (out,), size = outs, outs[0].size
        stream = should_stream(out.reshape(-1), *ins)
        return [entry.call(*ins, out, **attrs, stream=stream, items=size, block=choose_block(size, 8, LANES))]
