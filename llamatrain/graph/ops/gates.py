"""Gates: glu(gate, up) = sigmoid(gate) · up, swiglu with silu in place of the sigmoid, geglu with gelu, reglu with relu.

silu(x) = x · sigmoid(x) alone is for graphs that users build themselves.
"""

from collections.abc import Sequence

from llamatrain.graph.ops.activations import (
    add_number,
    gelu,
    gelu_back,
    gelu_second_derivative,
    relu,
    sigmoid,
    sigmoid_slope,
    step,
)
from llamatrain.graph.ops.arithmetic import add, mul, scale
from llamatrain.graph.ops.movement import gradient_or_zeros, join_columns, split_columns
from llamatrain.graph.ops.shape_rules import SECOND, floats, require
from llamatrain.graph.tensor import BF16, F32, Node, Op, Spec, Tensor, gradient, op


@op(in_place=((0, 0),), is_cheap=True)
def silu(x: Spec) -> Spec:
    """Return x · sigmoid(x)."""
    return Spec(x.shape, floats(x))


@gradient(silu)
def _(node: Node, dy: Tensor):
    return (silu_back(dy, node.sources[0]),)


@op(in_place=((0, 0), (0, 1)))
def silu_back(dy: Spec, x: Spec) -> Spec:
    """Return dy times the derivative of silu at x."""
    require(dy.shape == x.shape, "needs dy like x")
    return Spec(x.shape, floats(dy, x))


@gradient(silu_back)
def _(node: Node, d: Tensor):
    dy, x = node.sources
    return silu_back(d, x), mul(mul(d, dy), silu_second_derivative(x))


def silu_second_derivative(x: Tensor) -> Tensor:
    """Return the second derivative of silu: s (1 - s) · (2 + x (1 - 2s)) with s = sigmoid(x)."""
    s = sigmoid(x)
    return mul(sigmoid_slope(s), add_number(mul(x, add_number(scale(s, by=-2.0), 1.0)), 2.0))


def _gate(gate: Spec, up: Spec) -> Spec:
    require(gate.shape == up.shape, "needs two sources of one shape")
    return gate if gate.dtype is up.dtype is BF16 else Spec(gate.shape, floats(gate, up))


def _gate_back(dy: Spec, gate: Spec, up: Spec) -> tuple[Spec, Spec]:
    """Return the specs of both gradients: bf16 if gate and up are, with dy in float32."""
    require(dy.shape == gate.shape == up.shape, "needs three sources of one shape")
    if gate.dtype is up.dtype is BF16:
        require(dy.dtype is F32, "needs dy in f32")
        return gate, up
    return Spec(gate.shape, floats(dy, gate, up)), Spec(up.shape, up.dtype)


def _gate_back_gradients(
    sources: Sequence[Tensor], a: Tensor, b: Tensor, *, by: Op, back: Op, bent: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of a gate's gradient, given those of dgate and dup, a and b."""
    dy, gate, up = sources
    to_dy = add(back(mul(a, up), gate), mul(b, by(gate)))
    to_gate = add(mul(mul(mul(a, dy), up), bent), back(mul(b, dy), gate))
    return to_dy, to_gate, back(mul(a, dy), gate)


@op(in_place=((0, 0), (0, 1)), is_cheap=True)
def glu(gate: Spec, up: Spec) -> Spec:
    """Return sigmoid(gate) · up."""
    require(gate.shape == up.shape, "needs two sources of one shape")
    return Spec(gate.shape, floats(gate, up))


@gradient(glu)
def _(node: Node, dy: Tensor):
    return glu_back(dy, *node.sources)


@op(in_place=((0, 1), (1, 2), (0, 0), (1, 0)))
def glu_back(dy: Spec, gate: Spec, up: Spec) -> tuple[Spec, Spec]:
    """Return the gradients of gate and up."""
    require(dy.shape == gate.shape == up.shape, "needs three sources of one shape")
    found = Spec(gate.shape, floats(dy, gate, up))
    return found, found


@gradient(glu_back)
def _(node: Node, dgate: Tensor | None, dup: Tensor | None):
    dy, gate, up = node.sources
    a, b = gradient_or_zeros(dgate, gate), gradient_or_zeros(dup, up)
    s = sigmoid(gate)
    slope = sigmoid_slope(s)
    to_dy = add(mul(mul(a, up), slope), mul(b, s))
    bent = mul(slope, add_number(scale(s, by=-2.0), 1.0))
    return to_dy, add(mul(mul(mul(a, dy), up), bent), mul(mul(b, dy), slope)), mul(mul(a, dy), slope)


@op(in_place=((0, 0), (0, 1)), rounded_sources=(0, 1), rounds_outputs=True, is_cheap=True)
def swiglu(gate: Spec, up: Spec) -> Spec:
    """Return silu(gate) · up."""
    return _gate(gate, up)


@gradient(swiglu)
def _(node: Node, dy: Tensor):
    return swiglu_back(dy, *node.sources)


@op(in_place=((0, 1), (1, 2), (0, 0), (1, 0)), rounded_sources=(1, 2), rounds_outputs=True, bf16_sources=(0,))
def swiglu_back(dy: Spec, gate: Spec, up: Spec) -> tuple[Spec, Spec]:
    """Return the gradients of gate and up."""
    return _gate_back(dy, gate, up)


@gradient(swiglu_back)
def _(node: Node, dgate: Tensor | None, dup: Tensor | None):
    _dy, gate, up = node.sources
    a, b = gradient_or_zeros(dgate, gate), gradient_or_zeros(dup, up)
    return _gate_back_gradients(
        node.sources, a, b, by=silu, back=silu_back, bent=silu_second_derivative(gate)
    )


@op(in_place=((0, 0), (0, 1)), rounded_sources=(0, 1), rounds_outputs=True, is_cheap=True)
def geglu(gate: Spec, up: Spec) -> Spec:
    """Return gelu(gate) · up."""
    return _gate(gate, up)


@gradient(geglu)
def _(node: Node, dy: Tensor):
    return geglu_back(dy, *node.sources)


@op(in_place=((0, 1), (1, 2), (0, 0), (1, 0)), rounded_sources=(1, 2), rounds_outputs=True, bf16_sources=(0,))
def geglu_back(dy: Spec, gate: Spec, up: Spec) -> tuple[Spec, Spec]:
    """Return the gradients of gate and up."""
    return _gate_back(dy, gate, up)


@gradient(geglu_back)
def _(node: Node, dgate: Tensor | None, dup: Tensor | None):
    _dy, gate, up = node.sources
    a, b = gradient_or_zeros(dgate, gate), gradient_or_zeros(dup, up)
    return _gate_back_gradients(
        node.sources, a, b, by=gelu, back=gelu_back, bent=gelu_second_derivative(gate)
    )


@op(in_place=((0, 0), (0, 1)), rounded_sources=(0, 1), rounds_outputs=True, is_cheap=True)
def reglu(gate: Spec, up: Spec) -> Spec:
    """Return relu(gate) · up."""
    return _gate(gate, up)


@gradient(reglu)
def _(node: Node, dy: Tensor):
    return reglu_back(dy, *node.sources)


@op(in_place=((0, 1), (1, 2), (0, 0), (1, 0)), rounded_sources=(1, 2), rounds_outputs=True, bf16_sources=(0,))
def reglu_back(dy: Spec, gate: Spec, up: Spec) -> tuple[Spec, Spec]:
    """Return the gradients of gate and up."""
    return _gate_back(dy, gate, up)


@gradient(reglu_back)
def _(node: Node, dgate: Tensor | None, dup: Tensor | None):
    dy, gate, up = node.sources
    a, b, slope = gradient_or_zeros(dgate, gate), gradient_or_zeros(dup, up), step(gate)
    to_dy = add(mul(mul(a, up), slope), mul(b, relu(gate)))
    return to_dy, mul(mul(b, dy), slope), mul(mul(a, dy), slope)


@op(rounded_sources=(0,), rounds_outputs=True, is_cheap=True)
def swiglu_halves(x: Spec) -> Spec:
    """Return swiglu of the first half of each row, the gate, and the second half."""
    require(len(x.shape) > 0 and x.shape[-1] % 2 == 0, "needs rows of two halves")
    half = Spec((*x.shape[:-1], x.shape[-1] // 2), x.dtype)
    return _gate(half, half)


@gradient(swiglu_halves)
def _(node: Node, dy: Tensor):
    return (swiglu_halves_back(dy, *node.sources),)


@op(in_place=((0, 1),), rounded_sources=(1,), rounds_outputs=True, bf16_sources=(0,))
def swiglu_halves_back(dy: Spec, x: Spec) -> Spec:
    """Return both gradients as the halves of each row."""
    (half,) = swiglu_halves.infer_specs(x)
    _gate_back(dy, half, half)
    return x


@gradient(swiglu_halves_back)
def _(node: Node, d: Tensor):
    dy, x = node.sources
    sizes = (x.shape[-1] // 2,) * 2
    (gate, up), (a, b) = (split_columns(each, sizes=sizes) for each in (x, d))
    to_dy, *to_x = _gate_back_gradients(
        (dy, gate, up), a, b, by=silu, back=silu_back, bent=silu_second_derivative(gate)
    )
    return to_dy, join_columns(*to_x)


@op(in_place=((0, 0), (0, 1)), is_cheap=True)
def clipped_swiglu(gate: Spec, up: Spec, *, slope: float, limit: float) -> Spec:
    """Return g · sigmoid(slope · g) · (u + 1), with gates up to a limit, and ups within it."""
    require(gate.shape == up.shape and limit > 0, "needs two sources of one shape, and a limit")
    return Spec(gate.shape, floats(gate, up))


@gradient(clipped_swiglu)
def _(node: Node, dy: Tensor):
    return clipped_swiglu_back(dy, *node.sources, **node.attrs)


@op(in_place=((0, 1), (1, 2), (0, 0), (1, 0)), no_gradient=SECOND)
def clipped_swiglu_back(dy: Spec, gate: Spec, up: Spec, *, slope: float, limit: float) -> tuple[Spec, Spec]:
    """Return the gradients of gate and up, which are zero beyond the limit."""
    require(dy.shape == gate.shape == up.shape, "needs three sources of one shape")
    found = Spec(gate.shape, floats(dy, gate, up))
    return found, found
