"""Gates: swiglu(gate, up) = silu(gate) · up. silu(x) = x · sigmoid(x) alone is for graphs of one's own, as ancestors had it."""

from llamatrain.graph.ops.activations import plus, sigmoid, slope
from llamatrain.graph.ops.arithmetic import add, mul, scale
from llamatrain.graph.ops.movement import or_zeros
from llamatrain.graph.ops.rules import floats, require
from llamatrain.graph.tensor import BF16, F32, Node, Spec, Tensor, gradient, op


@op(in_place=((0, 0),), light=True)
def silu(x: Spec) -> Spec:
    return Spec(x.shape, floats(x))


@gradient(silu)
def _(node: Node, dy: Tensor):
    return (silu_back(dy, node.sources[0]),)


@op(in_place=((0, 0), (0, 1)))
def silu_back(dy: Spec, x: Spec) -> Spec:
    require(dy.shape == x.shape, "needs dy like x")
    return Spec(x.shape, floats(dy, x))


@gradient(silu_back)
def _(node: Node, d: Tensor):
    dy, x = node.sources
    return silu_back(d, x), mul(mul(d, dy), bend(x))


def bend(x: Tensor) -> Tensor:
    """The second derivative of silu: s (1 - s) · (2 + x (1 - 2s)) with s = sigmoid(x)."""
    s = sigmoid(x)
    return mul(slope(s), plus(mul(x, plus(scale(s, by=-2.0), 1.0)), 2.0))


@op(in_place=((0, 0), (0, 1)), rounds=(0, 1), gives_rounded=True, light=True)
def swiglu(gate: Spec, up: Spec) -> Spec:
    require(gate.shape == up.shape, "needs two sources of one shape")
    return gate if gate.dtype is up.dtype is BF16 else Spec(gate.shape, floats(gate, up))


@gradient(swiglu)
def _(node: Node, dy: Tensor):
    return swiglu_back(dy, *node.sources)


@op(in_place=((0, 1), (1, 2), (0, 0), (1, 0)), rounds=(1, 2), gives_rounded=True)
def swiglu_back(dy: Spec, gate: Spec, up: Spec) -> tuple[Spec, Spec]:
    """Both gradients; bf16 where gate and up are, of a dy in full precision."""
    require(dy.shape == gate.shape == up.shape, "needs three sources of one shape")
    if gate.dtype is up.dtype is BF16:
        require(dy.dtype is F32, "needs dy in f32")
        return gate, up
    return Spec(gate.shape, floats(dy, gate, up)), Spec(up.shape, up.dtype)


@gradient(swiglu_back)
def _(node: Node, dgate: Tensor | None, dup: Tensor | None):
    dy, gate, up = node.sources
    a, b = or_zeros(dgate, gate), or_zeros(dup, up)
    to_dy = add(silu_back(mul(a, up), gate), mul(b, silu(gate)))
    to_gate = add(mul(mul(mul(a, dy), up), bend(gate)), silu_back(mul(b, dy), gate))
    return to_dy, to_gate, silu_back(mul(a, dy), gate)
