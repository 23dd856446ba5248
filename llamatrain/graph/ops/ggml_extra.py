"""Ops of ggml's graphs that no llama here uses, for graphs that users build themselves.

(Decoding uses `set`.)
"""

import math

from llamatrain.graph.ops.arithmetic import mul, scale
from llamatrain.graph.ops.movement import cast, fill, reshape, view
from llamatrain.graph.ops.reduce import spread, sum, sum_rows
from llamatrain.graph.ops.shape_rules import Slices, alike, broadcast, floats, region, require
from llamatrain.graph.tensor import I32, DType, Node, Spec, Tensor, gradient, op


@op(in_place=((0, 0),))
def add1(a: Spec, b: Spec) -> Spec:
    """Return a plus the one number in b."""
    require(math.prod(b.shape) == 1, "the second source must hold one number")
    return Spec(a.shape, floats(a, b))


@gradient(add1)
def _(node: Node, dy: Tensor):
    return dy, reshape(sum(dy), shape=node.sources[1].shape)


@op(in_place=((0, 0),))
def neg(x: Spec) -> Spec:
    """Return -x."""
    return Spec(x.shape, floats(x))


@gradient(neg)
def _(node: Node, dy: Tensor):
    return (neg(dy),)


@op(in_place=((0, 0),))
def abs(x: Spec) -> Spec:
    """Return the absolute value of x."""
    return Spec(x.shape, floats(x))


@gradient(abs)
def _(node: Node, dy: Tensor):
    return (mul(dy, sgn(node.sources[0])),)


@op(in_place=((0, 0),))
def sgn(x: Spec) -> Spec:
    """Return the sign of x: -1, 0 or 1."""
    return Spec(x.shape, floats(x))


@gradient(sgn)
def _(node: Node, dy: Tensor):
    return (fill(shape=dy.shape, value=0.0, dtype=dy.dtype),)


@op(in_place=((0, 0), (0, 1)))
def div(a: Spec, b: Spec) -> Spec:
    """Return a / b with broadcasting."""
    return Spec(broadcast(a.shape, b.shape), floats(a, b))


@gradient(div)
def _(node: Node, dy: Tensor):
    _a, b = node.sources
    da = div(dy, b)
    return da, scale(mul(da, node.outputs[0]), by=-1.0)


@op(in_place=((0, 0),))
def sqrt(x: Spec) -> Spec:
    """Return the square root of x."""
    return Spec(x.shape, floats(x))


@gradient(sqrt)
def _(node: Node, dy: Tensor):
    return (scale(div(dy, node.outputs[0]), by=0.5),)


@op(in_place=((0, 0),))
def log(x: Spec) -> Spec:
    """Return the natural logarithm of x."""
    return Spec(x.shape, floats(x))


@gradient(log)
def _(node: Node, dy: Tensor):
    return (div(dy, node.sources[0]),)


@op(in_place=((0, 0),))
def sin(x: Spec) -> Spec:
    """Return the sine of x."""
    return Spec(x.shape, floats(x))


@gradient(sin)
def _(node: Node, dy: Tensor):
    return (mul(dy, cos(node.sources[0])),)


@op(in_place=((0, 0),))
def cos(x: Spec) -> Spec:
    """Return the cosine of x."""
    return Spec(x.shape, floats(x))


@gradient(cos)
def _(node: Node, dy: Tensor):
    return (neg(mul(dy, sin(node.sources[0]))),)


@op()
def add_cast(a: Spec, b: Spec, *, dtype: DType) -> Spec:
    """Return a + b in another type; a may be of lower precision than b."""
    require(b.dtype is not I32 and a.dtype is not I32, "needs float sources")
    return Spec(broadcast(a.shape, b.shape), dtype)


@gradient(add_cast)
def _(node: Node, dy: Tensor):
    return tuple(dy if dy.dtype is source.dtype else cast(dy, dtype=source.dtype) for source in node.sources)


@op()
def mean(x: Spec) -> Spec:
    """Return the mean of all elements."""
    require(math.prod(x.shape) > 0, "there is no mean of nothing")
    return Spec((), floats(x))


@gradient(mean)
def _(node: Node, dy: Tensor):
    (x,) = node.sources
    return (spread(scale(dy, by=1 / x.size), x.shape),)


@op()
def diag(x: Spec) -> Spec:
    """Return a matrix with x on its diagonal: (..., 1, n) -> (..., n, n)."""
    require(len(x.shape) >= 2 and x.shape[-2] == 1, "needs an axis of size 1 before the last")
    return Spec((*x.shape[:-2], x.shape[-1], x.shape[-1]), floats(x))


@gradient(diag)
def _(node: Node, dy: Tensor):
    (x,) = node.sources
    eye = diag(fill(shape=(1, x.shape[-1]), value=1.0, dtype=x.dtype))
    kept = sum_rows(mul(dy, eye))
    return (reshape(kept, shape=x.shape),)


@op(in_place=((0, 0),), masked_outputs=(0,))
def diag_mask_inf(x: Spec, *, past: int = 0) -> Spec:
    """Set elements to -inf where column > row + past."""
    require(len(x.shape) >= 2, "needs matrices")
    return Spec(x.shape, floats(x))


@gradient(diag_mask_inf)
def _(node: Node, dy: Tensor):
    return (diag_mask_zero(dy, past=node.attrs.get("past", 0)),)


@op(in_place=((0, 0),))
def diag_mask_zero(x: Spec, *, past: int = 0) -> Spec:
    """Set elements to 0 where column > row + past."""
    require(len(x.shape) >= 2, "needs matrices")
    return Spec(x.shape, floats(x))


@gradient(diag_mask_zero)
def _(node: Node, dy: Tensor):
    return (diag_mask_zero(dy, past=node.attrs.get("past", 0)),)


@op()
def cpy(x: Spec, y: Spec, *, into: bool = False) -> Spec:
    """Return y in the shape and type of x; with `into`, in x's memory."""
    require(x.shape == y.shape, "needs sources of one shape")
    return x


@gradient(cpy)
def _(node: Node, dy: Tensor):
    y = node.sources[1]
    return None, dy if dy.dtype is y.dtype else cast(dy, dtype=y.dtype)


@op(in_place=((0, 0),))
def set(x: Spec, y: Spec, *, slices: Slices, into: bool = False) -> Spec:
    """Return x with a part replaced by y."""
    require(region(x, slices) == y.shape, f"the part {slices} has the shape {list(region(x, slices))}")
    return alike(x, y)


@gradient(set)
def _(node: Node, dy: Tensor):
    y, slices = node.sources[1], node.attrs["slices"]
    return set(dy, fill(shape=y.shape, value=0.0, dtype=y.dtype), slices=slices), view(dy, slices=slices)
