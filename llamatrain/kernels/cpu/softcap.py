"""Soft caps, c tanh(x / c), alone and inside attention and the fused loss."""

import numpy as np

from llamatrain.compiler.declare import F32, KernelEntry, Real, inline
from llamatrain.compiler.vectors import LANES, load_until, store_until, tanh
from llamatrain.kernels.cpu.chunking import choose_block, should_stream
from llamatrain.kernels.cpu.registry import kernel

ONE = np.float32(1)


@inline
def cap_flat(x, y, lo, hi, factor, cap, stream):
    """Compute y = cap tanh(x factor / cap) for elements lo to hi."""
    inner, outer = np.float32(factor / cap), np.float32(cap)
    for i in range(lo, hi, LANES):
        store_until(y, i, hi, tanh(load_until(x, i, hi) * inner) * outer, stream)


@inline
def cap_slope(y, inverse):
    """Return the slope at an output y; `inverse` is 1 / cap."""
    part = y * inverse
    return ONE - part * part


@KernelEntry
def softcap_flat(lo, hi, thread, x: F32, y: F32, cap: Real, stream):
    """Cap elements lo to hi."""
    cap_flat(x, y, lo, hi, 1.0, cap, stream)


@KernelEntry
def softcap_back_flat(lo, hi, thread, dy: F32, y: F32, dx: F32, cap: Real, stream):
    """Compute the gradient of a soft cap for elements lo to hi."""
    inverse = np.float32(1 / cap)
    for i in range(lo, hi, LANES):
        store_until(dx, i, hi, load_until(dy, i, hi) * cap_slope(load_until(y, i, hi), inverse), stream)


for _name, _entry in (("softcap", softcap_flat), ("softcap_back", softcap_back_flat)):

    @kernel(_name)
    def capped(outs, ins, attrs, scratch, threads, entry=_entry):
        """Return the call of a soft cap or its gradient."""
        (y,), size = outs, outs[0].size
        stream = should_stream(y.reshape(-1), *ins)
        return [
            entry.call(
                *ins, y, cap=attrs["cap"], stream=stream, items=size, block=choose_block(size, 8, LANES)
            )
        ]
