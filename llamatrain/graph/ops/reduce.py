"""Sums, and their transpose, repetition."""

from llamatrain.graph.ops.arithmetic import mul, scale
from llamatrain.graph.ops.movement import reshape
from llamatrain.graph.ops.shape_rules import floats, require
from llamatrain.graph.tensor import Node, Shape, Spec, Tensor, gradient, op


@op()
def sum(x: Spec) -> Spec:
    """Return the sum of all elements."""
    return Spec((), floats(x))


@gradient(sum)
def _(node: Node, dy: Tensor):
    return (spread(dy, node.sources[0].shape),)


@op()
def sum_rows(x: Spec) -> Spec:
    """Return sums over the last axis, which stays with size 1."""
    require(len(x.shape) > 0, "needs an axis")
    return Spec((*x.shape[:-1], 1), floats(x))


@gradient(sum_rows)
def _(node: Node, dy: Tensor):
    return (spread(dy, node.sources[0].shape),)


@op()
def sum_sqr(x: Spec) -> Spec:
    """Return the sum of all squares, without storing them."""
    return Spec((), floats(x))


@gradient(sum_sqr)
def _(node: Node, dy: Tensor):
    return (scale(mul(node.sources[0], dy), by=2.0),)


@op()
def repeat(x: Spec, *, shape: Shape) -> Spec:
    """Tile x to fill a shape."""
    fits = len(shape) == len(x.shape) and all(
        n > 0 and size % n == 0 for size, n in zip(shape, x.shape, strict=True)
    )
    require(fits, f"{list(shape)} is no multiple of the source's shape")
    return Spec(tuple(shape), floats(x))


@gradient(repeat)
def _(node: Node, dy: Tensor):
    return (repeat_back(dy, shape=node.sources[0].shape),)


@op()
def repeat_back(y: Spec, *, shape: Shape) -> Spec:
    """Return the sum of all copies of `shape` in y."""
    fits = len(shape) == len(y.shape) and all(
        n > 0 and size % n == 0 for size, n in zip(y.shape, shape, strict=True)
    )
    require(fits, f"the source's shape is no multiple of {list(shape)}")
    return Spec(tuple(shape), floats(y))


@gradient(repeat_back)
def _(node: Node, dy: Tensor):
    return (repeat(dy, shape=node.sources[0].shape),)


def spread(x: Tensor, shape: Shape) -> Tensor:
    """Broadcast x to a shape."""
    ones = (1,) * (len(shape) - len(x.shape)) + x.shape
    x = x if ones == x.shape else reshape(x, shape=ones)
    return x if ones == shape else repeat(x, shape=shape)


def sum_to(y: Tensor, shape: Shape) -> Tensor:
    """Sum y over the axes along which `shape` was broadcast to it."""
    ones = (1,) * (len(y.shape) - len(shape)) + shape
    y = y if ones == y.shape else repeat_back(y, shape=ones)
    return y if shape == y.shape else reshape(y, shape=shape)
