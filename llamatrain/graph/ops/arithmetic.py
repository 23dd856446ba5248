"""Elementwise arithmetic.

A rule gives one gradient for each source; if a source was broadcast, autodiff sums its gradient back.
"""

from llamatrain.graph.ops.shape_rules import broadcast, floats, require
from llamatrain.graph.tensor import Node, Spec, Tensor, gradient, op


@op(in_place=((0, 0), (0, 1)))
def add(a: Spec, b: Spec) -> Spec:
    """Return a + b with broadcasting."""
    return Spec(broadcast(a.shape, b.shape), floats(a, b))


@gradient(add)
def _(node: Node, dy: Tensor):
    return dy, dy


@op(in_place=((0, 0), (0, 1)))
def sub(a: Spec, b: Spec) -> Spec:
    """Return a - b with broadcasting."""
    return Spec(broadcast(a.shape, b.shape), floats(a, b))


@gradient(sub)
def _(node: Node, dy: Tensor):
    return dy, scale(dy, by=-1.0)


@op(in_place=((0, 0), (0, 1)))
def mul(a: Spec, b: Spec) -> Spec:
    """Return a · b with broadcasting."""
    return Spec(broadcast(a.shape, b.shape), floats(a, b))


@gradient(mul)
def _(node: Node, dy: Tensor):
    a, b = node.sources
    return mul(dy, b), mul(dy, a)


@op(in_place=((0, 0),), is_cheap=True, bf16_outputs=(0,))
def scale(x: Spec, *, by: float) -> Spec:
    """Return x times a constant."""
    require(isinstance(by, int | float), f"needs a number, not {by!r}")
    return Spec(x.shape, floats(x))


@gradient(scale)
def _(node: Node, dy: Tensor):
    return (scale(dy, by=node.attrs["by"]),)


@op(in_place=((0, 0),))
def sqr(x: Spec) -> Spec:
    """Return x²."""
    return Spec(x.shape, floats(x))


@gradient(sqr)
def _(node: Node, dy: Tensor):
    return (scale(mul(dy, node.sources[0]), by=2.0),)
