"""Dropout: the dropped elements follow from a key, a salt and their positions, so that they can be recomputed.

The position of an element is the row in the whole step, the token in that row, and the index in the token. So
masks do not depend on how a step's rows are divided into micro-batches, groups and ranks.
"""

import math

from llamatrain.graph.ops.shape_rules import floats, require
from llamatrain.graph.tensor import I32, Node, Spec, Tensor, gradient, op


@op(in_place=((0, 0),))
def dropout(x: Spec, key: Spec, *tokens: Spec, rate: float, salt: int, length: int) -> Spec:
    """Return x with a share of its elements set to zero and the others scaled up.

    x has an entry for each token of rows of `length` tokens. The key is a seed and the number of the first
    row; `tokens` are the numbers of x's tokens if x does not have all.
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
