"""Rotation of pairs (x[2i], x[2i+1]) by the angle in the table for the position.

With `halves`, pairs are (x[i], x[i + pairs]), and the table has all cosines of a position before its sines.
Elements behind the pairs do not change.
"""

from llamatrain.graph.ops.shape_rules import floats, require
from llamatrain.graph.tensor import I32, Node, Spec, Tensor, gradient, op


def _rope(x: Spec, positions: Spec, table: Spec, halves: bool) -> Spec:
    require(len(x.shape) == 4 and positions.shape == x.shape[:2], "needs x (B, T, H, d) and positions (B, T)")
    require(positions.dtype is I32, "positions must be i32")
    wanted = "(positions, 2, pairs)" if halves else "(positions, pairs, 2)"
    require(
        len(table.shape) == 3 and table.shape[1 if halves else 2] == 2,
        f"needs a table {wanted} of cosines and sines",
    )
    require(table.shape[1] * table.shape[2] <= x.shape[3], "the table has more pairs than a head")
    return Spec(x.shape, floats(x, table))


@op(in_place=((0, 0),), bf16_sources=(0,), bf16_outputs=(0,))
def rope(x: Spec, positions: Spec, table: Spec, *, halves: bool = False) -> Spec:
    """Rotate heads by their positions."""
    return _rope(x, positions, table, halves)


@gradient(rope)
def _(node: Node, dy: Tensor):
    return rope_back(dy, *node.sources[1:], **node.attrs), None, None


@op(in_place=((0, 0),), bf16_sources=(0,), bf16_outputs=(0,))
def rope_back(dy: Spec, positions: Spec, table: Spec, *, halves: bool = False) -> Spec:
    """Rotate back."""
    return _rope(dy, positions, table, halves)


@gradient(rope_back)
def _(node: Node, d: Tensor):
    return rope(d, *node.sources[1:], **node.attrs), None, None
