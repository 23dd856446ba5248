"""Gates: silu(x) = x sigmoid(x), swiglu(gate, up) = silu(gate) up, and their gradients."""

import numpy as np

from llamatrain.kernels.cpu.binding import kernel
from llamatrain.kernels.cpu.vector import LANES, exp, load_to, portion, store_to, streams
from llamatrain.machine.jit import Entry, f32, inline

ONE = np.float32(1)


@inline
def sigmoid(x):  # type: ignore[no-untyped-def]
    return ONE / (ONE + exp(x * np.float32(-1)))


@inline
def slope(x, s):  # type: ignore[no-untyped-def]
    """The derivative of silu, s = sigmoid(x)."""
    return s * (ONE + x * (ONE - s))


@Entry
def silu_flat(lo, hi, thread, a):  # type: ignore[no-untyped-def]
    x, y, past = f32(a[0]), f32(a[1]), a[2]
    for i in range(lo, hi, LANES):
        v = load_to(x, i, hi)
        store_to(y, i, hi, v * sigmoid(v), past)


@Entry
def silu_back_flat(lo, hi, thread, a):  # type: ignore[no-untyped-def]
    dy, x, dx, past = f32(a[0]), f32(a[1]), f32(a[2]), a[3]
    for i in range(lo, hi, LANES):
        v = load_to(x, i, hi)
        store_to(dx, i, hi, load_to(dy, i, hi) * slope(v, sigmoid(v)), past)


@Entry
def swiglu_flat(lo, hi, thread, a):  # type: ignore[no-untyped-def]
    gate, up, y, past = f32(a[0]), f32(a[1]), f32(a[2]), a[3]
    for i in range(lo, hi, LANES):
        g = load_to(gate, i, hi)
        store_to(y, i, hi, g * sigmoid(g) * load_to(up, i, hi), past)


@Entry
def swiglu_back_flat(lo, hi, thread, a):  # type: ignore[no-untyped-def]
    dy, gate, up, dgate, dup, past = f32(a[0]), f32(a[1]), f32(a[2]), f32(a[3]), f32(a[4]), a[5]
    for i in range(lo, hi, LANES):
        d, g, u = load_to(dy, i, hi), load_to(gate, i, hi), load_to(up, i, hi)
        s = sigmoid(g)
        store_to(dgate, i, hi, d * u * slope(g, s), past)
        store_to(dup, i, hi, d * g * s, past)


ENTRIES = {"silu": silu_flat, "silu_back": silu_back_flat, "swiglu": swiglu_flat, "swiglu_back": swiglu_back_flat}

for _name, _entry in ENTRIES.items():

    @kernel(_name)
    def flat(outs, ins, attrs, scratch, threads, entry=_entry):  # type: ignore[no-untyped-def]
        past = all(streams(out.reshape(-1), *ins) for out in outs)
        return [entry.call(*ins, *outs, past, items=outs[0].size, block=portion(outs[0].size, 8, LANES))]
