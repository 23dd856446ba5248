"""Gates: silu and gelu alone, glu(gate, up) = sigmoid(gate) up, swiglu with silu, geglu with gelu, reglu with relu.

gelu(x) = x sigmoid(v(x)) with v(x) = A x + B x³; silu(x) = x sigmoid(x).

Their gradients are here, too. If gate and up are bfloat16, so is what products read: the result of swiglu, geglu
or reglu, dgate and dup. dy is always float32.
"""

from collections.abc import Sequence

import numpy as np

from llamatrain.compiler.declare import F32, KernelEntry, Real, f32, inline, u16
from llamatrain.compiler.vectors import LANES, exp, load_until, maximum, splat, store_until, where_nonzero
from llamatrain.graph.ops.activations import A, B
from llamatrain.kernels.cpu.chunking import choose_block, should_stream
from llamatrain.kernels.cpu.registry import Array, all_float32, kernel

ONE, LINEAR, CUBIC, CUBIC_SLOPE = (np.float32(each) for each in (1, A, B, 3 * B))
SILU, GELU, RELU = (np.int64(each) for each in range(3))


@inline
def gate_share(kind, x):
    """Return the share of x that the gate passes."""
    if kind == RELU:
        return where_nonzero(maximum(x, splat(0.0)), splat(0.0), splat(ONE))
    v = x * (x * x * CUBIC + LINEAR) if kind == GELU else x
    return ONE / (ONE + exp(v * np.float32(-1)))


@inline
def gate_slope(kind, x, s):
    """Return the derivative of x s, with s = gate_share(kind, x)."""
    if kind == RELU:
        return s
    bent = x * (x * x * CUBIC_SLOPE + LINEAR) if kind == GELU else x
    return s * (ONE + bent * (ONE - s))


@inline
def gate_value(kind, x, s):
    """Return x s, with s = gate_share(kind, x); 0 for -inf."""
    return maximum(x, splat(0.0)) if kind == RELU else x * s


@inline
def activate(kind, x, y, lo, hi, stream):
    """Compute silu or gelu of elements lo to hi."""
    for i in range(lo, hi, LANES):
        v = load_until(x, i, hi)
        store_until(y, i, hi, v * gate_share(kind, v), stream)


@inline
def activation_gradient(kind, dy, x, dx, lo, hi, stream):
    """Compute the gradient of silu or gelu for elements lo to hi."""
    for i in range(lo, hi, LANES):
        v = load_until(x, i, hi)
        store_until(dx, i, hi, load_until(dy, i, hi) * gate_slope(kind, v, gate_share(kind, v)), stream)


@KernelEntry
def silu_flat(lo, hi, thread, x: F32, y: F32, stream, half):
    """Compute silu of elements lo to hi."""
    activate(SILU, x, y, lo, hi, stream)


@KernelEntry
def silu_back_flat(lo, hi, thread, dy: F32, x: F32, dx: F32, stream, half):
    """Compute the gradient of silu for elements lo to hi."""
    activation_gradient(SILU, dy, x, dx, lo, hi, stream)


@KernelEntry
def gelu_flat(lo, hi, thread, x: F32, y: F32, stream, half):
    """Compute gelu of elements lo to hi."""
    activate(GELU, x, y, lo, hi, stream)


@KernelEntry
def gelu_back_flat(lo, hi, thread, dy: F32, x: F32, dx: F32, stream, half):
    """Compute the gradient of gelu for elements lo to hi."""
    activation_gradient(GELU, dy, x, dx, lo, hi, stream)


@KernelEntry
def glu_flat(lo, hi, thread, gate: F32, up: F32, y: F32, stream, half):
    """Compute glu of elements lo to hi."""
    for i in range(lo, hi, LANES):
        store_until(y, i, hi, gate_share(SILU, load_until(gate, i, hi)) * load_until(up, i, hi), stream)


@KernelEntry
def glu_back_flat(lo, hi, thread, dy: F32, gate: F32, up: F32, dgate: F32, dup: F32, stream, half):
    """Compute the gradients of glu for elements lo to hi."""
    for i in range(lo, hi, LANES):
        d, u, s = load_until(dy, i, hi), load_until(up, i, hi), gate_share(SILU, load_until(gate, i, hi))
        store_until(dgate, i, hi, d * u * s * (ONE - s), stream)
        store_until(dup, i, hi, d * s, stream)


@inline
def apply_gate(kind, gate, up, y, lo, hi, stream):
    """Apply a gate to elements lo to hi."""
    for i in range(lo, hi, LANES):
        g = load_until(gate, i, hi)
        store_until(y, i, hi, gate_value(kind, g, gate_share(kind, g)) * load_until(up, i, hi), stream)


@inline
def apply_gate_typed(kind, half, gate, up, y, lo, hi, stream):
    """Apply a gate to arrays of bf16 or float32."""
    if half:
        apply_gate(kind, u16(gate), u16(up), u16(y), lo, hi, stream)
    else:
        apply_gate(kind, f32(gate), f32(up), f32(y), lo, hi, stream)


@KernelEntry
def swiglu_flat(lo, hi, thread, gate, up, y, stream, half):
    """Compute swiglu of elements lo to hi."""
    apply_gate_typed(SILU, half, gate, up, y, lo, hi, stream)


@KernelEntry
def geglu_flat(lo, hi, thread, gate, up, y, stream, half):
    """Compute geglu of elements lo to hi."""
    apply_gate_typed(GELU, half, gate, up, y, lo, hi, stream)


@KernelEntry
def reglu_flat(lo, hi, thread, gate, up, y, stream, half):
    """Compute reglu of elements lo to hi."""
    apply_gate_typed(RELU, half, gate, up, y, lo, hi, stream)


@inline
def gate_gradients(kind, dy, gate, up, dgate, dup, lo, hi, stream):
    """Compute the gradients of a gate for elements lo to hi."""
    for i in range(lo, hi, LANES):
        d, g, u = load_until(dy, i, hi), load_until(gate, i, hi), load_until(up, i, hi)
        s = gate_share(kind, g)
        store_until(dgate, i, hi, d * u * gate_slope(kind, g, s), stream)
        store_until(dup, i, hi, d * gate_value(kind, g, s), stream)


@inline
def gate_gradients_typed(kind, half, dy, gate, up, dgate, dup, lo, hi, stream):
    """Compute the gradients of a gate for arrays of bf16 or float32."""
    if half:
        gate_gradients(kind, f32(dy), u16(gate), u16(up), u16(dgate), u16(dup), lo, hi, stream)
    else:
        gate_gradients(kind, f32(dy), f32(gate), f32(up), f32(dgate), f32(dup), lo, hi, stream)


@KernelEntry
def swiglu_back_flat(lo, hi, thread, dy, gate, up, dgate, dup, stream, half):
    """Compute the gradients of swiglu for elements lo to hi."""
    gate_gradients_typed(SILU, half, dy, gate, up, dgate, dup, lo, hi, stream)


@KernelEntry
def geglu_back_flat(lo, hi, thread, dy, gate, up, dgate, dup, stream, half):
    """Compute the gradients of geglu for elements lo to hi."""
    gate_gradients_typed(GELU, half, dy, gate, up, dgate, dup, lo, hi, stream)


@KernelEntry
def reglu_back_flat(lo, hi, thread, dy, gate, up, dgate, dup, stream, half):
    """Compute the gradients of reglu for elements lo to hi."""
    gate_gradients_typed(RELU, half, dy, gate, up, dgate, dup, lo, hi, stream)


ENTRIES = {
    "silu": silu_flat,
    "silu_back": silu_back_flat,
    "glu": glu_flat,
    "glu_back": glu_back_flat,
    "gelu": gelu_flat,
    "gelu_back": gelu_back_flat,
    "swiglu": swiglu_flat,
    "swiglu_back": swiglu_back_flat,
    "geglu": geglu_flat,
    "geglu_back": geglu_back_flat,
    "reglu": reglu_flat,
    "reglu_back": reglu_back_flat,
}


def _takes(outs: Sequence[Array], ins: Sequence[Array], attrs: dict) -> bool:
    *dy, gate, up = ins
    kind = gate.dtype
    return (
        kind in (np.float32, np.uint16)
        and all(x.dtype == kind for x in (up, *outs))
        and all(d.dtype == np.float32 for d in dy)
    )


for _name, _entry in ENTRIES.items():

    @kernel(_name, takes=all_float32 if _name.startswith(("silu", "gelu")) else _takes)
    def flat(outs, ins, attrs, scratch, threads, entry=_entry):
        """Return the call of a gate or its gradient."""
        stream, half = all(should_stream(out.reshape(-1), *ins) for out in outs), outs[0].dtype == np.uint16
        return [
            entry.call(
                *ins,
                *outs,
                stream=stream,
                half=half,
                items=outs[0].size,
                block=choose_block(outs[0].size, 8, LANES),
            )
        ]


# ---- clipped gates -------------------------------------------------------------------------------


@inline
def clip_below(x, limit):
    """Return the smaller of x and a limit; NaN stays."""
    return maximum(x * np.float32(-1), limit * np.float32(-1)) * np.float32(-1)


@KernelEntry
def clipped_flat(lo, hi, thread, gate: F32, up: F32, y: F32, slope: Real, limit: Real, stream):
    """Compute clipped_swiglu of elements lo to hi."""
    most, steep = splat(np.float32(limit)), np.float32(slope)
    for i in range(lo, hi, LANES):
        g = clip_below(load_until(gate, i, hi), most)
        u = maximum(clip_below(load_until(up, i, hi), most), most * np.float32(-1))
        store_until(y, i, hi, g * gate_share(SILU, g * steep) * (u + ONE), stream)


@inline
def within(x, clipped):
    """Return 1 where clipping changed nothing, and else 0."""
    return where_nonzero(x - clipped, splat(ONE), splat(np.float32(0)))


@KernelEntry
def clipped_back_flat(
    lo, hi, thread, dy: F32, gate: F32, up: F32, dgate: F32, dup: F32, slope: Real, limit: Real, stream
):
    """Compute the gradients of clipped_swiglu for elements lo to hi."""
    most, steep = splat(np.float32(limit)), np.float32(slope)
    for i in range(lo, hi, LANES):
        d, x, z = load_until(dy, i, hi), load_until(gate, i, hi), load_until(up, i, hi)
        g, u = clip_below(x, most), maximum(clip_below(z, most), most * np.float32(-1))
        s = gate_share(SILU, g * steep)
        store_until(dgate, i, hi, d * (u + ONE) * s * (ONE + g * steep * (ONE - s)) * within(x, g), stream)
        store_until(dup, i, hi, d * g * s * within(z, u), stream)


for _name, _entry in (("clipped_swiglu", clipped_flat), ("clipped_swiglu_back", clipped_back_flat)):

    @kernel(_name)
    def clipped(outs, ins, attrs, scratch, threads, entry=_entry):
        """Return the call of clipped_swiglu or its gradient."""
        stream = all(should_stream(out.reshape(-1), *ins) for out in outs)
        how = {"stream": stream, "items": outs[0].size, "block": choose_block(outs[0].size, 8, LANES)}
        return [entry.call(*ins, *outs, attrs["slope"], attrs["limit"], **how)]


# ---- gate and up in one array, as the halves of its rows -----------------------------------------


@KernelEntry
def halves_flat(lo, hi, thread, x, y, width, stream, half):
    """Compute elements lo to hi of swiglu, with gate and up as halves of rows of 2 `width`."""
    size = 2 if half else 4
    for row in range(lo // width, (hi + width - 1) // width):
        gate, first, end = x + 2 * row * width * size, max(0, lo - row * width), min(width, hi - row * width)
        apply_gate_typed(SILU, half, gate, gate + width * size, y + row * width * size, first, end, stream)


@KernelEntry
def halves_back_flat(lo, hi, thread, dy, x, dx, width, stream, half):
    """Compute the gradients of elements lo to hi, as halves of rows of 2 `width`."""
    size = 2 if half else 4
    for row in range(lo // width, (hi + width - 1) // width):
        at, first, end = 2 * row * width * size, max(0, lo - row * width), min(width, hi - row * width)
        gate, up, dgate, dup = x + at, x + at + width * size, dx + at, dx + at + width * size
        gate_gradients_typed(SILU, half, dy + row * width * 4, gate, up, dgate, dup, first, end, stream)


def _takes_halves(outs: Sequence[Array], ins: Sequence[Array], attrs: dict) -> bool:
    *dy, x = ins
    return (
        x.dtype in (np.float32, np.uint16)
        and outs[0].dtype == x.dtype
        and all(d.dtype == np.float32 for d in dy)
    )


for _name, _entry in (("swiglu_halves", halves_flat), ("swiglu_halves_back", halves_back_flat)):

    @kernel(_name, takes=_takes_halves)
    def halves(outs, ins, attrs, scratch, threads, entry=_entry):
        """Return the call of swiglu on halves or its gradient."""
        (out,), x = outs, ins[-1]
        width, size = x.shape[-1] // 2, x.size // 2
        stream = should_stream(out[..., :width], *ins)
        how = {"width": width, "stream": stream, "half": out.dtype == np.uint16}
        return [entry.call(*ins, out, **how, items=size, block=choose_block(size, 8, LANES))] if size else []
