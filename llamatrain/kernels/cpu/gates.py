"""Gates: silu(x) = x sigmoid(x), swiglu(gate, up) = silu(gate) up, and their gradients.

Where gate and up are bfloat16, so is what goes on into products: swiglu's result, dgate and dup. dy is float32 everywhere.
"""

from collections.abc import Sequence

import numpy as np

from llamatrain.kernels.cpu.binding import Array, all_float32, kernel
from llamatrain.kernels.cpu.portions import portion, streams
from llamatrain.machine.entry import F32, Entry, f32, inline, u16
from llamatrain.machine.simd import LANES, exp, load_to, store_to

ONE = np.float32(1)


@inline
def sigmoid(x):
    return ONE / (ONE + exp(x * np.float32(-1)))


@inline
def slope(x, s):
    """The derivative of silu, s = sigmoid(x)."""
    return s * (ONE + x * (ONE - s))


@Entry
def silu_flat(lo, hi, thread, x: F32, y: F32, past, half):
    for i in range(lo, hi, LANES):
        v = load_to(x, i, hi)
        store_to(y, i, hi, v * sigmoid(v), past)


@Entry
def silu_back_flat(lo, hi, thread, dy: F32, x: F32, dx: F32, past, half):
    for i in range(lo, hi, LANES):
        v = load_to(x, i, hi)
        store_to(dx, i, hi, load_to(dy, i, hi) * slope(v, sigmoid(v)), past)


@inline
def swiglu_of(gate, up, y, lo, hi, past):
    for i in range(lo, hi, LANES):
        g = load_to(gate, i, hi)
        store_to(y, i, hi, g * sigmoid(g) * load_to(up, i, hi), past)


@Entry
def swiglu_flat(lo, hi, thread, gate, up, y, past, half):
    if half:
        swiglu_of(u16(gate), u16(up), u16(y), lo, hi, past)
    else:
        swiglu_of(f32(gate), f32(up), f32(y), lo, hi, past)


@inline
def swiglu_back_of(dy, gate, up, dgate, dup, lo, hi, past):
    for i in range(lo, hi, LANES):
        d, g, u = load_to(dy, i, hi), load_to(gate, i, hi), load_to(up, i, hi)
        s = sigmoid(g)
        store_to(dgate, i, hi, d * u * slope(g, s), past)
        store_to(dup, i, hi, d * g * s, past)


@Entry
def swiglu_back_flat(lo, hi, thread, dy: F32, gate, up, dgate, dup, past, half):
    if half:
        swiglu_back_of(dy, u16(gate), u16(up), u16(dgate), u16(dup), lo, hi, past)
    else:
        swiglu_back_of(dy, f32(gate), f32(up), f32(dgate), f32(dup), lo, hi, past)


ENTRIES = {"silu": silu_flat, "silu_back": silu_back_flat, "swiglu": swiglu_flat, "swiglu_back": swiglu_back_flat}


def _takes(outs: Sequence[Array], ins: Sequence[Array], attrs: dict) -> bool:
    *dy, gate, up = ins
    kind = gate.dtype
    return (
        kind in (np.float32, np.uint16) and all(x.dtype == kind for x in (up, *outs)) and all(d.dtype == np.float32 for d in dy)
    )


for _name, _entry in ENTRIES.items():

    @kernel(_name, takes=_takes if _name.startswith("swiglu") else all_float32)
    def flat(outs, ins, attrs, scratch, threads, entry=_entry):
        past, half = all(streams(out.reshape(-1), *ins) for out in outs), outs[0].dtype == np.uint16
        return [entry.call(*ins, *outs, past=past, half=half, items=outs[0].size, block=portion(outs[0].size, 8, LANES))]
