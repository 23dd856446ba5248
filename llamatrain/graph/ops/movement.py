"""Movement of elements: views, copies, and updates of parts."""

import math

from llamatrain.graph.ops.shape_rules import Slices, floats, region, require
from llamatrain.graph.tensor import (
    BF16,
    F32,
    I32,
    DType,
    Layout,
    Node,
    Shape,
    Spec,
    Tensor,
    dense,
    gradient,
    op,
)

# ---- views: the same bytes, seen otherwise ---------------------------------


def _reshape_layout(at: Layout, x: Spec, out: Spec, **attrs: object) -> Layout | None:
    return Layout(at.offset, dense(out.shape)) if contiguous(at, x.shape) else None


def contiguous(at: Layout, shape: Shape) -> bool:
    """Return True if a layout is in C order."""
    wanted = dense(shape)
    return math.prod(shape) == 0 or all(
        n == 1 or have == want for n, have, want in zip(shape, at.strides, wanted, strict=True)
    )


@op(layout=_reshape_layout, is_cheap=True)
def reshape(x: Spec, *, shape: Shape) -> Spec:
    """Return x in another shape."""
    require(math.prod(shape) == math.prod(x.shape), f"{list(shape)} holds another number of elements")
    return Spec(tuple(shape), x.dtype)


@gradient(reshape)
def _(node: Node, dy: Tensor):
    return (reshape(dy, shape=node.sources[0].shape),)


def _permute_layout(at: Layout, x: Spec, out: Spec, *, axes: tuple[int, ...]) -> Layout:
    return Layout(at.offset, tuple(at.strides[axis] for axis in axes))


@op(layout=_permute_layout)
def permute(x: Spec, *, axes: tuple[int, ...]) -> Spec:
    """Return x with its axes permuted."""
    require(sorted(axes) == list(range(len(x.shape))), f"{list(axes)} are not its axes in some order")
    return Spec(tuple(x.shape[axis] for axis in axes), x.dtype)


@gradient(permute)
def _(node: Node, dy: Tensor):
    axes = node.attrs["axes"]
    return (permute(dy, axes=tuple(axes.index(axis) for axis in range(len(axes)))),)


def transpose(x: Tensor) -> Tensor:
    """Swap the last two axes."""
    axes = tuple(range(len(x.shape)))
    return permute(x, axes=(*axes[:-2], axes[-1], axes[-2]))


def flatten(x: Tensor) -> Tensor:
    """Join all axes but the first."""
    return reshape(x, shape=(x.shape[0], math.prod(x.shape[1:])))


def _view_layout(at: Layout, x: Spec, out: Spec, *, slices: Slices) -> Layout:
    starts = (start * stride for (start, _, _), stride in zip(slices, at.strides, strict=True))
    strides = tuple(step * stride for (_, _, step), stride in zip(slices, at.strides, strict=True))
    return Layout(sum(starts, at.offset), strides)


@op(layout=_view_layout)
def view(x: Spec, *, slices: Slices) -> Spec:
    """Return a part of x, given by slices."""
    return Spec(region(x, slices), x.dtype)


@gradient(view)
def _(node: Node, dy: Tensor):
    (x,) = node.sources
    return (acc(fill(shape=x.shape, value=0.0, dtype=x.dtype), dy, slices=node.attrs["slices"]),)


# ---- copies, and parts written into a whole --------------------------------
# `into=True` writes into the first source's own memory: for caches and for gradients that add up over runs.


@op(no_gradient="it has no sources")
def fill(*, shape: Shape, value: float, dtype: DType = F32) -> Spec:
    """Return an array filled with one number."""
    return Spec(tuple(shape), dtype)


def gradient_or_zeros(gradient_: Tensor | None, like: Tensor) -> Tensor:
    """Return a gradient, or zeros if there is none."""
    return gradient_ or fill(shape=like.shape, value=0.0, dtype=like.dtype)


@op(is_cheap=True)
def cast(x: Spec, *, dtype: DType) -> Spec:
    """Convert x to another type."""
    require(x.dtype is not I32 and dtype is not I32, "casts are between float types")
    return Spec(x.shape, dtype)


@gradient(cast)
def _(node: Node, dy: Tensor):
    return (cast(dy, dtype=node.sources[0].dtype),)


@op(takes_views=True)
def cont(x: Spec) -> Spec:
    """Copy x to C order."""
    return x


@gradient(cont)
def _(node: Node, dy: Tensor):
    return (dy,)


@op()
def split_columns(x: Spec, *, sizes: tuple[int, ...]) -> tuple[Spec, ...]:
    """Split x into parts of these numbers of columns."""
    require(len(x.shape) > 0 and x.dtype is not I32, "needs rows of floats")
    require(
        len(sizes) > 0 and min(sizes) > 0 and sum(sizes) == x.shape[-1],
        f"{list(sizes)} are not what its columns add up to",
    )
    return tuple(Spec((*x.shape[:-1], size), x.dtype) for size in sizes)


@gradient(split_columns)
def _(node: Node, *dys: Tensor | None):
    return (join_columns(*(gradient_or_zeros(dy, like) for dy, like in zip(dys, node.outputs, strict=True))),)


@op()
def join_columns(*parts: Spec, dtype: DType | None = None) -> Spec:
    """Concatenate the columns of the parts, optionally in another type."""
    require(len(parts) > 0 and len(parts[0].shape) > 0, "needs rows")
    first = parts[0]
    require(
        first.dtype is not I32 and all(part.dtype is first.dtype for part in parts),
        "needs parts of one float type",
    )
    require(all(part.shape[:-1] == first.shape[:-1] for part in parts), "needs parts of as many rows each")
    require(
        dtype in (None, first.dtype) or (dtype is BF16 and first.dtype is F32),
        f"does not make {dtype} of {first.dtype}",
    )
    return Spec((*first.shape[:-1], sum(part.shape[-1] for part in parts)), dtype or first.dtype)


@gradient(join_columns)
def _(node: Node, dy: Tensor):
    kind = node.sources[0].dtype
    dy = dy if dy.dtype is kind else cast(dy, dtype=kind)
    made = split_columns(dy, sizes=tuple(part.shape[-1] for part in node.sources))
    return made if isinstance(made, tuple) else (made,)


@op(in_place=((0, 0),))
def acc(x: Spec, y: Spec, *, slices: Slices, into: bool = False) -> Spec:
    """Return x with y added to a part of it."""
    require(region(x, slices) == y.shape, f"the part {slices} has the shape {list(region(x, slices))}")
    return Spec(x.shape, floats(x, y))


@gradient(acc)
def _(node: Node, dy: Tensor):
    return dy, view(dy, slices=node.attrs["slices"])
