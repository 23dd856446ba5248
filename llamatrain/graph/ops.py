"""The general ops: arithmetic, sums, products of matrices, movement of elements, rows. Each by shape rule and gradient rule.

Kernels of the same names stand in the same order in `kernels/reference/ops.py`. Gradients are graphs, made of these ops.
A rule gives one gradient a source; where arithmetic broadcast a source, the walk in `autodiff` sums the gradient back.
"""

import builtins
import math

import numpy as np

from llamatrain.graph.tensor import BF16, F32, I32, DType, Layout, Misfit, Node, Shape, Spec, Tensor, dense, gradient, op

Slices = tuple[tuple[int, int, int], ...]  # (start, stop, step) for each axis, step > 0


def floats(*specs: Spec) -> DType:
    """The float type that all these share."""
    kinds = {spec.dtype for spec in specs}
    if len(kinds) > 1 or kinds & {BF16, I32}:
        raise Misfit(f"needs sources of one float type, not {' and '.join(sorted(kind.name for kind in kinds))}")
    return kinds.pop()


def broadcast(*shapes: Shape) -> Shape:
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise Misfit(f"shapes {' and '.join(str(list(shape)) for shape in shapes)} do not broadcast") from None


def alike(x: Spec, y: Spec) -> Spec:
    """x, where y of any one type is to be put into it."""
    require(x.dtype is y.dtype, f"needs sources of one type, not {x.dtype} and {y.dtype}")
    return x


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Misfit(what)


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
def cast(x: Spec, *, dtype: DType) -> Spec:
    require(x.dtype is not I32 and dtype is not I32, "casts are between float types")
    return Spec(x.shape, dtype)


@gradient(cast)
def _(node: Node, dy: Tensor):
    return (cast(dy, dtype=node.sources[0].dtype),)


@op()
def add_cast(a: Spec, b: Spec, *, dtype: DType) -> Spec:
    """a + b, in a type of its own; a may be of less precision than b."""
    require(b.dtype is not I32 and a.dtype is not I32, "needs float sources")
    return Spec(broadcast(a.shape, b.shape), dtype)


@gradient(add_cast)
def _(node: Node, dy: Tensor):
    return tuple(dy if dy.dtype is source.dtype else cast(dy, dtype=source.dtype) for source in node.sources)


@op()
def fill(*, shape: Shape, value: float, dtype: DType = F32) -> Spec:
    return Spec(tuple(shape), dtype)


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


def product(a: Spec, b: Spec, rows: int, columns: int, shared: tuple[int, int]) -> Spec:
    require(len(a.shape) >= 2 and len(b.shape) >= 2, "needs matrices")
    require(shared[0] == shared[1], f"{shared[0]} does not match {shared[1]}")
    dtype = F32 if BF16 in (a.dtype, b.dtype) and {a.dtype, b.dtype} <= {BF16, F32} else floats(a, b)
    return Spec((*broadcast(a.shape[:-2], b.shape[:-2]), rows, columns), dtype)


@op()
def matmul(x: Spec, w: Spec) -> Spec:
    """x wᵀ: (m, k), (n, k) -> (m, n)"""
    require(min(len(x.shape), len(w.shape)) >= 2, "needs matrices")
    return product(x, w, x.shape[-2], w.shape[-2], (x.shape[-1], w.shape[-1]))


@gradient(matmul)
def _(node: Node, dy: Tensor):
    x, w = node.sources
    return matmul_nn(dy, w), out_prod(dy, x)


@op()
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


# ---- views: the same bytes, seen otherwise ---------------------------------


def _reshape_layout(at: Layout, x: Spec, out: Spec, **attrs: object) -> Layout | None:
    return Layout(at.offset, dense(out.shape)) if contiguous(at, x.shape) else None


def contiguous(at: Layout, shape: Shape) -> bool:
    wanted = dense(shape)
    return math.prod(shape) == 0 or all(n == 1 or have == want for n, have, want in zip(shape, at.strides, wanted, strict=True))


@op(layout=_reshape_layout)
def reshape(x: Spec, *, shape: Shape) -> Spec:
    require(math.prod(shape) == math.prod(x.shape), f"{list(shape)} holds another number of elements")
    return Spec(tuple(shape), x.dtype)


@gradient(reshape)
def _(node: Node, dy: Tensor):
    return (reshape(dy, shape=node.sources[0].shape),)


def _permute_layout(at: Layout, x: Spec, out: Spec, *, axes: tuple[int, ...]) -> Layout:
    return Layout(at.offset, tuple(at.strides[axis] for axis in axes))


@op(layout=_permute_layout)
def permute(x: Spec, *, axes: tuple[int, ...]) -> Spec:
    require(sorted(axes) == list(range(len(x.shape))), f"{list(axes)} are not its axes in some order")
    return Spec(tuple(x.shape[axis] for axis in axes), x.dtype)


@gradient(permute)
def _(node: Node, dy: Tensor):
    axes = node.attrs["axes"]
    return (permute(dy, axes=tuple(axes.index(axis) for axis in range(len(axes)))),)


def transpose(x: Tensor) -> Tensor:
    """The last two axes exchanged."""
    axes = tuple(range(len(x.shape)))
    return permute(x, axes=(*axes[:-2], axes[-1], axes[-2]))


def _region(x: Spec, slices: Slices) -> Shape:
    require(len(slices) == len(x.shape), f"needs a (start, stop, step) for each axis, not {slices}")
    for (start, stop, step), size in zip(slices, x.shape, strict=True):
        require(0 <= start <= stop <= size and step > 0, f"slice {start}:{stop}:{step} is not within {size}")
    return tuple(len(range(*each)) for each in slices)


def _view_layout(at: Layout, x: Spec, out: Spec, *, slices: Slices) -> Layout:
    starts = (start * stride for (start, _, _), stride in zip(slices, at.strides, strict=True))
    strides = tuple(step * stride for (_, _, step), stride in zip(slices, at.strides, strict=True))
    return Layout(builtins.sum(starts, at.offset), strides)


@op(layout=_view_layout)
def view(x: Spec, *, slices: Slices) -> Spec:
    """A part of x, by slices."""
    return Spec(_region(x, slices), x.dtype)


@gradient(view)
def _(node: Node, dy: Tensor):
    (x,) = node.sources
    return (acc(fill(shape=x.shape, value=0.0, dtype=x.dtype), dy, slices=node.attrs["slices"]),)


# ---- copies, and parts written into a whole --------------------------------
# `into=True` writes into the first source's own memory: for caches and for gradients that add up over runs.


@op()
def cont(x: Spec) -> Spec:
    """A copy in C order."""
    return x


@gradient(cont)
def _(node: Node, dy: Tensor):
    return (dy,)


@op()
def cpy(x: Spec, y: Spec, *, into: bool = False) -> Spec:
    """y, laid out and typed like x: (x's memory, if into)."""
    require(x.shape == y.shape, "needs sources of one shape")
    return x


@gradient(cpy)
def _(node: Node, dy: Tensor):
    y = node.sources[1]
    return None, dy if dy.dtype is y.dtype else cast(dy, dtype=y.dtype)


@op(in_place=((0, 0),))
def acc(x: Spec, y: Spec, *, slices: Slices, into: bool = False) -> Spec:
    """x with y added to a part of it."""
    require(_region(x, slices) == y.shape, f"the part {slices} has the shape {list(_region(x, slices))}")
    return Spec(x.shape, floats(x, y))


@gradient(acc)
def _(node: Node, dy: Tensor):
    return dy, view(dy, slices=node.attrs["slices"])


@op(in_place=((0, 0),))
def set(x: Spec, y: Spec, *, slices: Slices, into: bool = False) -> Spec:
    """x with a part of it replaced by y."""
    require(_region(x, slices) == y.shape, f"the part {slices} has the shape {list(_region(x, slices))}")
    return alike(x, y)


@gradient(set)
def _(node: Node, dy: Tensor):
    y, slices = node.sources[1], node.attrs["slices"]
    return set(dy, fill(shape=y.shape, value=0.0, dtype=y.dtype), slices=slices), view(dy, slices=slices)


# ---- rows by number --------------------------------------------------------


def _ids(spec: Spec) -> None:
    require(spec.dtype is I32, "row numbers must be i32")


@op()
def get_rows(w: Spec, ids: Spec) -> Spec:
    """w's rows of these numbers: (V, D), any shape -> that shape + (D,)"""
    _ids(ids)
    require(len(w.shape) == 2 and w.dtype is not I32, "needs a matrix of floats")
    return Spec((*ids.shape, w.shape[1]), F32 if w.dtype is BF16 else w.dtype)


@gradient(get_rows)
def _(node: Node, dy: Tensor):
    w, ids = node.sources
    return get_rows_back(dy, ids, rows=w.shape[0]), None


@op()
def get_rows_back(dy: Spec, ids: Spec, *, rows: int) -> Spec:
    """Each row of dy added to the row of that number."""
    _ids(ids)
    require(len(dy.shape) > 0 and dy.shape[:-1] == ids.shape, "needs a row number for each row")
    return Spec((rows, dy.shape[-1]), floats(dy))


@gradient(get_rows_back)
def _(node: Node, d: Tensor):
    return get_rows(d, node.sources[1]), None


@op(in_place=((0, 0),))
def set_rows(x: Spec, rows: Spec, ids: Spec, *, into: bool = False) -> Spec:
    """x with the rows of these numbers replaced; of rows with the same number the last stays."""
    _ids(ids)
    require(len(ids.shape) == 1 and rows.shape == (*ids.shape, *x.shape[1:]), "needs a row of x's shape for each number")
    return alike(x, rows)


@gradient(set_rows)
def _(node: Node, dy: Tensor):
    x, rows, ids = node.sources
    width = (x.shape[0], math.prod(x.shape[1:]))
    zeros = fill(shape=rows.shape, value=0.0, dtype=rows.dtype)
    taken = reshape(get_rows(reshape(dy, shape=width), ids), shape=rows.shape)
    return set_rows(dy, zeros, ids), taken, None


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
