"""Dropout: which elements are left out follows from a key, a salt and their places, so that it can be made again."""

import math

from llamatrain.graph.ops.rules import floats, require
from llamatrain.graph.tensor import I32, Node, Spec, Tensor, gradient, op


@op(in_place=((0, 0),))
def dropout(x: Spec, key: Spec, *, rate: float, salt: int) -> Spec:
    """x with a share of its elements zero, and the others as much larger."""
    require(key.dtype is I32 and key.shape == (2,), "needs a key of two i32")
    require(0 <= rate < 1 and x.shape != () and math.prod(x.shape) < 1 << 32, f"cannot leave out {rate} of x")
    return Spec(x.shape, floats(x))


@gradient(dropout)
def _(node: Node, dy: Tensor):
    return dropout(dy, node.sources[1], **node.attrs), None
