"""Gates: swiglu(gate, up) = silu(gate) · up. silu(x) = x · sigmoid(x) alone is for graphs of one's own, as ancestors had it."""

from llamatrain.graph.ops.rules import SECOND, floats, require
from llamatrain.graph.tensor import BF16, F32, Node, Spec, Tensor, gradient, op


@op(in_place=((0, 0),), light=True)
def silu(x: Spec) -> Spec:
    return Spec(x.shape, floats(x))


@gradient(silu)
def _(node: Node, dy: Tensor):
    return (silu_back(dy, node.sources[0]),)


@op(in_place=((0, 0), (0, 1)), no_gradient=SECOND)
def silu_back(dy: Spec, x: Spec) -> Spec:
    require(dy.shape == x.shape, "needs dy like x")
    return Spec(x.shape, floats(dy, x))


@op(in_place=((0, 0), (0, 1)), rounds=(0, 1), gives_rounded=True, light=True)
def swiglu(gate: Spec, up: Spec) -> Spec:
    require(gate.shape == up.shape, "needs two sources of one shape")
    return gate if gate.dtype is up.dtype is BF16 else Spec(gate.shape, floats(gate, up))


@gradient(swiglu)
def _(node: Node, dy: Tensor):
    return swiglu_back(dy, *node.sources)


@op(in_place=((0, 1), (1, 2), (0, 0), (1, 0)), rounds=(1, 2), gives_rounded=True, no_gradient=SECOND)
def swiglu_back(dy: Spec, gate: Spec, up: Spec) -> tuple[Spec, Spec]:
    """Both gradients; bf16 where gate and up are, of a dy in full precision."""
    require(dy.shape == gate.shape == up.shape, "needs three sources of one shape")
    if gate.dtype is up.dtype is BF16:
        require(dy.dtype is F32, "needs dy in f32")
        return gate, up
    return Spec(gate.shape, floats(dy, gate, up)), Spec(up.shape, up.dtype)
