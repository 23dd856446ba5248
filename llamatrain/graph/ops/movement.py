"""Movement of elements: views, copies, parts written into a whole, rows by number. Each by shape rule and gradient rule.

Kernels of the same names stand in the same order in `kernels/reference/movement.py`.
"""

import builtins
import math

from llamatrain.graph.ops.rules import Slices, alike, floats, require
from llamatrain.graph.tensor import BF16, F32, I32, DType, Layout, Node, Quantised, Shape, Spec, Tensor, dense, gradient, op

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
def fill(*, shape: Shape, value: float, dtype: DType = F32) -> Spec:
    return Spec(tuple(shape), dtype)


@op()
def cast(x: Spec, *, dtype: DType) -> Spec:
    require(x.dtype is not I32 and dtype is not I32, "casts are between float types")
    return Spec(x.shape, dtype)


@gradient(cast)
def _(node: Node, dy: Tensor):
    return (cast(dy, dtype=node.sources[0].dtype),)


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


@op(blocks=0)
def get_rows(w: Spec, ids: Spec) -> Spec:
    """w's rows of these numbers: (V, D), any shape -> that shape + (D,)"""
    _ids(ids)
    require(len(w.shape) == 2 and w.dtype is not I32, "needs a matrix of floats")
    return Spec((*ids.shape, w.shape[1]), F32 if w.dtype is BF16 or isinstance(w.dtype, Quantised) else w.dtype)


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
