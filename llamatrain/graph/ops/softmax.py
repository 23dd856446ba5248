"""Softmax over the last axis."""

from llamatrain.graph.ops.arithmetic import mul, sub
from llamatrain.graph.ops.reduce import sum_rows
from llamatrain.graph.ops.shape_rules import floats, require
from llamatrain.graph.tensor import Node, Spec, Tensor, gradient, op


@op(in_place=((0, 0),))
def soft_max(x: Spec) -> Spec:
    """Return the softmax of x."""
    require(len(x.shape) > 0, "needs an axis")
    return Spec(x.shape, floats(x))


@gradient(soft_max)
def _(node: Node, dy: Tensor):
    return (soft_max_back(dy, node.outputs[0]),)


@op(in_place=((0, 0), (0, 1)))
def soft_max_back(dy: Spec, y: Spec) -> Spec:
    """Return the gradient of x, given the output y."""
    require(dy.shape == y.shape, "needs dy like y")
    return Spec(y.shape, floats(dy, y))


@gradient(soft_max_back)
def _(node: Node, d: Tensor):
    dy, y = node.sources
    return soft_max_back(d, y), sub(mul(d, sub(dy, sum_rows(mul(dy, y)))), mul(dy, sum_rows(mul(d, y))))
