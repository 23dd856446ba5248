"""Dropout: which elements are left out follows from a key, a salt and their places, so that it can be made again.

An element's place is the row of the whole step that its token is in, the token's place in that row, and its own in the token: so
masks are the same however a step's rows are divided among batches, groups and ranks.
"""

import math

from llamatrain.graph.ops.shape_rules import floats, require
from llamatrain.graph.tensor import I32, Node, Spec, Tensor, gradient, op


@op(in_place=((0, 0),))
def dropout(x: Spec, key: Spec, *tokens: Spec, rate: float, salt: int, length: int) -> Spec:
    """x, an entry for each token of rows of a length, with a share of its elements zero, and the others as much larger.

    The key is a seed and the number of the first row; `tokens` are the numbers of those that x has, where it has not all.
    """
    require(key.dtype is I32 and key.shape == (2,), "needs a key of two i32")
    require(0 <= rate < 1 and x.shape != () and math.prod(x.shape) < 1 << 32, f"cannot leave out {rate} of x")
    require(length > 0, f"needs rows of a token or more, not {length}")
    wanted = all(each.dtype is I32 and each.shape == x.shape[:1] for each in tokens)
    require(len(tokens) <= 1 and wanted, "needs an i32 for each entry of x")
    return Spec(x.shape, floats(x))


@gradient(dropout)
def _(node: Node, dy: Tensor):
    _, *told = node.sources
    return dropout(dy, *told, **node.attrs), *(None for _ in told)
