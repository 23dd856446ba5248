"""Arithmetic, sums, products of matrices, diagonals. Each by shape rule and gradient rule.

Kernels of the same names stand in the same order in `kernels/reference/arithmetic.py`. A rule gives one gradient a source;
where arithmetic broadcast a source, the walk in `autodiff` sums the gradient back.
"""

import math

from llamatrain.graph.ops.movement import cast, fill, reshape
from llamatrain.graph.ops.rules import broadcast, floats, require
from llamatrain.graph.tensor import BF16, F32, I32, DType, Node, Quantised, Shape, Spec, Tensor, gradient, op

# ---- arithmetic, element by element ----------------------------------------


@op(in_place=((0, 0), (0, 1)))
def add(a: Spec, b: Spec) -> Spec:
    return Spec(broadcast(a.shape, b.shape), floats(a, b))


@gradient(add)
def _(node: Node, dy: Tensor):
    return dy, dy


@op(in_place=((0, 0),))
def add1(a: Spec, b: Spec) -> Spec:
    """a plus the one number in b."""
    require(math.prod(b.shape) == 1, "the second source must hold one number")
    return Spec(a.shape, floats(a, b))


@gradient(add1)
def _(node: Node, dy: Tensor):
    return dy, reshape(sum(dy), shape=node.sources[1].shape)


@op(in_place=((0, 0), (0, 1)))
def sub(a: Spec, b: Spec) -> Spec:
    return Spec(broadcast(a.shape, b.shape), floats(a, b))


@gradient(sub)
def _(node: Node, dy: Tensor):
    return dy, scale(dy, by=-1.0)


@op(in_place=((0, 0), (0, 1)))
def mul(a: Spec, b: Spec) -> Spec:
    return Spec(broadcast(a.shape, b.shape), floats(a, b))


@gradient(mul)
def _(node: Node, dy: Tensor):
    a, b = node.sources
    return mul(dy, b), mul(dy, a)


@op(in_place=((0, 0), (0, 1)))
def div(a: Spec, b: Spec) -> Spec:
    return Spec(broadcast(a.shape, b.shape), floats(a, b))


@gradient(div)
def _(node: Node, dy: Tensor):
    _a, b = node.sources
    da = div(dy, b)
    return da, scale(mul(da, node.outputs[0]), by=-1.0)


@op(in_place=((0, 0),))
def scale(x: Spec, *, by: float) -> Spec:
    require(isinstance(by, int | float), f"needs a number, not {by!r}")
    return Spec(x.shape, floats(x))


@gradient(scale)
def _(node: Node, dy: Tensor):
    return (scale(dy, by=node.attrs["by"]),)


@op(in_place=((0, 0),))
def sqr(x: Spec) -> Spec:
    return Spec(x.shape, floats(x))


@gradient(sqr)
def _(node: Node, dy: Tensor):
    return (scale(mul(dy, node.sources[0]), by=2.0),)


@op(in_place=((0, 0),))
def sqrt(x: Spec) -> Spec:
    return Spec(x.shape, floats(x))


@gradient(sqrt)
def _(node: Node, dy: Tensor):
    return (scale(div(dy, node.outputs[0]), by=0.5),)


@op(in_place=((0, 0),))
def log(x: Spec) -> Spec:
    return Spec(x.shape, floats(x))


@gradient(log)
def _(node: Node, dy: Tensor):
    return (div(dy, node.sources[0]),)


@op()
def add_cast(a: Spec, b: Spec, *, dtype: DType) -> Spec:
    """a + b, in a type of its own; a may be of less precision than b."""
    require(b.dtype is not I32 and a.dtype is not I32, "needs float sources")
    return Spec(broadcast(a.shape, b.shape), dtype)


@gradient(add_cast)
def _(node: Node, dy: Tensor):
    return tuple(dy if dy.dtype is source.dtype else cast(dy, dtype=source.dtype) for source in node.sources)


# ---- sums ------------------------------------------------------------------


@op()
def sum(x: Spec) -> Spec:
    """The one number that all elements add up to."""
    return Spec((), floats(x))


@gradient(sum)
def _(node: Node, dy: Tensor):
    return (spread(dy, node.sources[0].shape),)


@op()
def sum_rows(x: Spec) -> Spec:
    """Sums over the last axis, which stays with size 1."""
    require(len(x.shape) > 0, "needs an axis")
    return Spec((*x.shape[:-1], 1), floats(x))


@gradient(sum_rows)
def _(node: Node, dy: Tensor):
    return (spread(dy, node.sources[0].shape),)


@op()
def mean(x: Spec) -> Spec:
    """The mean of all elements."""
    require(math.prod(x.shape) > 0, "there is no mean of nothing")
    return Spec((), floats(x))


@gradient(mean)
def _(node: Node, dy: Tensor):
    (x,) = node.sources
    return (spread(scale(dy, by=1 / x.size), x.shape),)


@op()
def sum_sqr(x: Spec) -> Spec:
    """The sum of all squares, without an array of them."""
    return Spec((), floats(x))


@gradient(sum_sqr)
def _(node: Node, dy: Tensor):
    return (scale(mul(node.sources[0], dy), by=2.0),)


@op()
def repeat(x: Spec, *, shape: Shape) -> Spec:
    """x laid out again and again until it fills shape."""
    fits = len(shape) == len(x.shape) and all(n > 0 and size % n == 0 for size, n in zip(shape, x.shape, strict=True))
    require(fits, f"{list(shape)} is no multiple of the source's shape")
    return Spec(tuple(shape), floats(x))


@gradient(repeat)
def _(node: Node, dy: Tensor):
    return (repeat_back(dy, shape=node.sources[0].shape),)


@op()
def repeat_back(y: Spec, *, shape: Shape) -> Spec:
    """The sum of all the copies of shape that make up y."""
    fits = len(shape) == len(y.shape) and all(n > 0 and size % n == 0 for size, n in zip(y.shape, shape, strict=True))
    require(fits, f"the source's shape is no multiple of {list(shape)}")
    return Spec(tuple(shape), floats(y))


@gradient(repeat_back)
def _(node: Node, dy: Tensor):
    return (repeat(dy, shape=node.sources[0].shape),)


def spread(x: Tensor, shape: Shape) -> Tensor:
    """x broadcast to shape."""
    ones = (1,) * (len(shape) - len(x.shape)) + x.shape
    x = x if ones == x.shape else reshape(x, shape=ones)
    return x if ones == shape else repeat(x, shape=shape)


def sum_to(y: Tensor, shape: Shape) -> Tensor:
    """y summed over the axes along which shape was broadcast to it."""
    ones = (1,) * (len(y.shape) - len(shape)) + shape
    y = y if ones == y.shape else repeat_back(y, shape=ones)
    return y if shape == y.shape else reshape(y, shape=shape)


# ---- products of matrices --------------------------------------------------
# y = x wᵀ, dx = dy w and dw = dyᵀ x: the three products of a linear layer, each the gradient of the others.
# Axes before the last two broadcast. Where a source is bf16 the other is rounded to it; the result is in full precision.
# w may be quantised: then it counts as the numbers that it stands for, in float32, and is frozen.


def product(a: Spec, b: Spec, rows: int, columns: int, shared: tuple[int, int]) -> Spec:
    require(len(a.shape) >= 2 and len(b.shape) >= 2, "needs matrices")
    require(shared[0] == shared[1], f"{shared[0]} does not match {shared[1]}")
    if isinstance(b.dtype, Quantised):
        dtype = F32 if a.dtype is BF16 else floats(a)
    else:
        dtype = F32 if BF16 in (a.dtype, b.dtype) and {a.dtype, b.dtype} <= {BF16, F32} else floats(a, b)
    return Spec((*broadcast(a.shape[:-2], b.shape[:-2]), rows, columns), dtype)


@op(blocks=1)
def matmul(x: Spec, w: Spec) -> Spec:
    """x wᵀ: (m, k), (n, k) -> (m, n)"""
    require(min(len(x.shape), len(w.shape)) >= 2, "needs matrices")
    return product(x, w, x.shape[-2], w.shape[-2], (x.shape[-1], w.shape[-1]))


@gradient(matmul)
def _(node: Node, dy: Tensor):
    x, w = node.sources
    return matmul_nn(dy, w), out_prod(dy, x)


@op(blocks=1)
def matmul_nn(y: Spec, w: Spec) -> Spec:
    """y w: (m, n), (n, k) -> (m, k)"""
    require(min(len(y.shape), len(w.shape)) >= 2, "needs matrices")
    return product(y, w, y.shape[-2], w.shape[-1], (y.shape[-1], w.shape[-2]))


@gradient(matmul_nn)
def _(node: Node, dx: Tensor):
    y, w = node.sources
    return matmul(dx, w), out_prod(y, dx)


@op()
def out_prod(a: Spec, b: Spec) -> Spec:
    """aᵀ b: (t, n), (t, k) -> (n, k)"""
    require(min(len(a.shape), len(b.shape)) >= 2, "needs matrices")
    return product(a, b, a.shape[-1], b.shape[-1], (a.shape[-2], b.shape[-2]))


@gradient(out_prod)
def _(node: Node, d: Tensor):
    a, b = node.sources
    return matmul(b, d), matmul_nn(a, d)


# ---- diagonals -------------------------------------------------------------


@op()
def diag(x: Spec) -> Spec:
    """(..., 1, n) -> (..., n, n) with x on the diagonal."""
    require(len(x.shape) >= 2 and x.shape[-2] == 1, "needs an axis of size 1 before the last")
    return Spec((*x.shape[:-2], x.shape[-1], x.shape[-1]), floats(x))


@gradient(diag)
def _(node: Node, dy: Tensor):
    (x,) = node.sources
    eye = diag(fill(shape=(1, x.shape[-1]), value=1.0, dtype=x.dtype))
    kept = sum_rows(mul(dy, eye))
    return (reshape(kept, shape=x.shape),)


@op(in_place=((0, 0),))
def diag_mask_inf(x: Spec, *, past: int = 0) -> Spec:
    """-inf where the column is beyond the row by more than past."""
    require(len(x.shape) >= 2, "needs matrices")
    return Spec(x.shape, floats(x))


@gradient(diag_mask_inf)
def _(node: Node, dy: Tensor):
    return (diag_mask_zero(dy, past=node.attrs.get("past", 0)),)


@op(in_place=((0, 0),))
def diag_mask_zero(x: Spec, *, past: int = 0) -> Spec:
    """0 where the column is beyond the row by more than past."""
    require(len(x.shape) >= 2, "needs matrices")
    return Spec(x.shape, floats(x))


@gradient(diag_mask_zero)
def _(node: Node, dy: Tensor):
    return (diag_mask_zero(dy, past=node.attrs.get("past", 0)),)
