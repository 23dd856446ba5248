"""Rotation of pairs (x[2i], x[2i+1]) by the angle that the table has for the position."""

from llamatrain.graph.ops.rules import floats, require
from llamatrain.graph.tensor import I32, Node, Spec, Tensor, gradient, op


def _rope(x: Spec, positions: Spec, table: Spec) -> Spec:
    require(len(x.shape) == 4 and positions.shape == x.shape[:2], "needs x (B, T, H, d) and positions (B, T)")
    require(positions.dtype is I32, "positions must be i32")
    require(len(table.shape) == 3 and table.shape[2] == 2, "needs a table (positions, pairs, 2) of cosines and sines")
    require(2 * table.shape[1] <= x.shape[3], "the table has more pairs than a head")
    return Spec(x.shape, floats(x, table))


@op(in_place=((0, 0),))
def rope(x: Spec, positions: Spec, table: Spec) -> Spec:
    return _rope(x, positions, table)


@gradient(rope)
def _(node: Node, dy: Tensor):
    return rope_back(dy, *node.sources[1:]), None, None


@op(in_place=((0, 0),))
def rope_back(dy: Spec, positions: Spec, table: Spec) -> Spec:
    """The rotation back."""
    return _rope(dy, positions, table)


@gradient(rope_back)
def _(node: Node, d: Tensor):
    return rope(d, *node.sources[1:]), None, None
