"""Rows of a matrix by their numbers."""

import math

from llamatrain.graph.ops.movement import fill, reshape
from llamatrain.graph.ops.shape_rules import alike, floats, require
from llamatrain.graph.tensor import BF16, F32, I32, Node, QuantizedType, Spec, Tensor, gradient, op


def _ids(spec: Spec) -> None:
    require(spec.dtype is I32, "row numbers must be i32")


@op(quantized_source=0)
def get_rows(w: Spec, ids: Spec) -> Spec:
    """Return rows of w by number: (V, D), any shape -> that shape + (D,)."""
    _ids(ids)
    require(len(w.shape) == 2 and w.dtype is not I32, "needs a matrix of floats")
    return Spec(
        (*ids.shape, w.shape[1]), F32 if w.dtype is BF16 or isinstance(w.dtype, QuantizedType) else w.dtype
    )


@gradient(get_rows)
def _(node: Node, dy: Tensor):
    w, ids = node.sources
    return get_rows_back(dy, ids, rows=w.shape[0]), None


@op()
def get_rows_back(dy: Spec, ids: Spec, *, rows: int) -> Spec:
    """Add each row of dy to the row of its number."""
    _ids(ids)
    require(len(dy.shape) > 0 and dy.shape[:-1] == ids.shape, "needs a row number for each row")
    return Spec((rows, dy.shape[-1]), floats(dy))


@gradient(get_rows_back)
def _(node: Node, d: Tensor):
    return get_rows(d, node.sources[1]), None


@op(in_place=((0, 0),))
def set_rows(x: Spec, rows: Spec, ids: Spec, *, into: bool = False) -> Spec:
    """Return x with rows replaced by number; of duplicate numbers, the last row wins."""
    _ids(ids)
    require(
        len(ids.shape) == 1 and rows.shape == (*ids.shape, *x.shape[1:]),
        "needs a row of x's shape for each number",
    )
    return alike(x, rows)


@gradient(set_rows)
def _(node: Node, dy: Tensor):
    x, rows, ids = node.sources
    width = (x.shape[0], math.prod(x.shape[1:]))
    zeros = fill(shape=rows.shape, value=0.0, dtype=rows.dtype)
    taken = reshape(get_rows(reshape(dy, shape=width), ids), shape=rows.shape)
    return set_rows(dy, zeros, ids), taken, None
