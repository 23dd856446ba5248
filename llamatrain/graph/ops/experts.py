"""Mixtures of experts: each row is multiplied with the weights of k of E experts.

A choice is one of the k experts of a row; a row of n has the choices n·k to n·k + k - 1. Products process
choices sorted by expert, so that each expert's weight is read once. `sort_choices` gives their order, and for each
expert where its choices end. Both are data: the graph is the same however many rows an expert gets.

Sorted choices are tensors (rows, k, ...), counted row by row. Rows of x, (rows, ...), may stand for all choices of
each row. Weights are stacks (E, out, in).
"""

from llamatrain.graph.ops.arithmetic import mul, scale, sub
from llamatrain.graph.ops.ggml_extra import div
from llamatrain.graph.ops.reduce import sum_rows
from llamatrain.graph.ops.shape_rules import floats, require
from llamatrain.graph.tensor import BF16, F32, I32, Node, QuantizedType, Spec, Tensor, gradient, op

NUMBERS = "its results are numbers of rows and experts"

# ---- which experts -----------------------------------------------------------------------------


@op(no_gradient=NUMBERS, stops_gradient=True)
def top_k(scores: Spec, *, k: int, groups: int = 1, groups_used: int = 1) -> Spec:
    """Return the columns of the k largest scores of each row: (rows, n) -> (rows, k).

    The largest comes first, of equal ones the first; NaN is the smallest. With groups of neighboring columns, only
    those of `groups_used` groups count: of the groups with the largest sums of their two largest scores.
    """
    require(len(scores.shape) == 2 and floats(scores) is scores.dtype, "needs rows of floats")
    columns = scores.shape[1]
    require(
        1 <= groups_used <= groups and columns % groups == 0, f"cannot use {groups_used} of {groups} groups"
    )
    require(groups == 1 or columns // groups >= 2, "needs groups of two columns or more")
    require(1 <= k <= columns // groups * groups_used, f"cannot choose {k} of {columns} columns")
    return Spec((scores.shape[0], k), I32)


@op()
def take_columns(x: Spec, ids: Spec) -> Spec:
    """Return elements of each row by their columns: (rows, n), (rows, k) -> (rows, k)."""
    require(len(x.shape) == len(ids.shape) == 2 and x.shape[0] == ids.shape[0], "needs columns for each row")
    require(ids.dtype is I32, "columns must be i32")
    return Spec(ids.shape, floats(x))


@gradient(take_columns)
def _(node: Node, dy: Tensor):
    x, ids = node.sources
    return put_columns(dy, ids, columns=x.shape[1]), None


@op()
def put_columns(y: Spec, ids: Spec, *, columns: int) -> Spec:
    """Return rows of zeros with elements added at their columns: (rows, k), (rows, k) -> (rows, columns)."""
    require(
        len(y.shape) == 2 and y.shape == ids.shape and ids.dtype is I32, "needs a column for each element"
    )
    return Spec((y.shape[0], columns), floats(y))


@gradient(put_columns)
def _(node: Node, dx: Tensor):
    return take_columns(dx, node.sources[1]), None


@op(in_place=((0, 0),))
def normalize_rows(x: Spec) -> Spec:
    """Return each row divided by its sum plus 1e-20, for rows of numbers that are not negative."""
    require(len(x.shape) > 0, "needs an axis")
    return Spec(x.shape, floats(x))


@gradient(normalize_rows)
def _(node: Node, dy: Tensor):
    return (normalize_rows_back(dy, node.sources[0]),)


@op(in_place=((0, 0),))
def normalize_rows_back(dy: Spec, x: Spec) -> Spec:
    """Return the gradient of x: (dy - dy · y) / s, where s is what a row is divided by, and y is x / s."""
    require(len(x.shape) > 0 and dy.shape == x.shape, "needs dy like x")
    return Spec(x.shape, floats(dy, x))


@gradient(normalize_rows_back)
def _(node: Node, d: Tensor):
    dy, x = node.sources
    by, total = sum_rows(x), sum_rows(d)
    squares = mul(by, by)
    to_dy = sub(div(d, by), div(mul(x, total), squares))
    shared = sub(scale(div(mul(total, sum_rows(mul(dy, x))), by), by=2), sum_rows(mul(d, dy)))
    return to_dy, div(sub(shared, mul(dy, total)), squares)


def choices_of_rows(ids: Spec, weights: Spec) -> None:
    """Check the experts and weights of rows."""
    require(len(ids.shape) == 2 and ids.dtype is I32, "needs the experts of each row")
    require(weights.shape == ids.shape[:1], "needs a weight for each row")


@op()
def balance_loss(probabilities: Spec, ids: Spec, weights: Spec) -> Spec:
    """Return how unevenly experts are chosen (Fedus et al. 2021): (rows, E), (rows, k), (rows) -> ().

    It is E · Σ f P over experts, where f is an expert's share of all choices and P the mean of its probabilities,
    both weighted by rows. It is 1 if all experts have the same share, or the same mean.
    """
    choices_of_rows(ids, weights)
    require(
        len(probabilities.shape) == 2 and probabilities.shape[0] == ids.shape[0],
        "needs probabilities of experts for each row",
    )
    return Spec((), floats(probabilities, weights))


@gradient(balance_loss)
def _(node: Node, dloss: Tensor):
    probabilities, ids, weights = node.sources
    return balance_loss_back(dloss, ids, weights, experts=probabilities.shape[1]), None, None


@op()
def balance_loss_back(dloss: Spec, ids: Spec, weights: Spec, *, experts: int) -> Spec:
    """Return the gradient of the probabilities: (), (rows, k), (rows) -> (rows, E)."""
    choices_of_rows(ids, weights)
    require(dloss.shape == (), "needs one number as dloss")
    return Spec((ids.shape[0], experts), floats(dloss, weights))


@gradient(balance_loss_back)
def _(node: Node, d: Tensor):
    _, ids, weights = node.sources
    return balance_loss(d, ids, weights), None, None


# ---- the order of choices ----------------------------------------------------------------------


@op(no_gradient=NUMBERS, stops_gradient=True)
def sort_choices(ids: Spec, *, experts: int) -> tuple[Spec, Spec, Spec]:
    """Sort choices by expert: (rows, k) -> order (rows, k), expert (rows, k), ends (E).

    order: the choice at each sorted place. Choices of one expert stay in order; expert: the expert at each place;
    ends: the place behind the last choice of each expert.
    """
    require(len(ids.shape) == 2 and ids.dtype is I32 and experts >= 1, "needs rows of experts")
    return ids, ids, Spec((experts,), I32)


@op()
def take_choices(x: Spec, order: Spec) -> Spec:
    """Return the numbers of choices in sorted order: (rows, k), (rows, k) -> (rows, k)."""
    require(
        len(x.shape) == 2 and x.shape == order.shape and order.dtype is I32, "needs a number for each choice"
    )
    return Spec(x.shape, floats(x))


@gradient(take_choices)
def _(node: Node, dy: Tensor):
    return put_choices(dy, node.sources[1]), None


@op()
def put_choices(y: Spec, order: Spec) -> Spec:
    """Return sorted numbers in the order of rows: the inverse of `take_choices`."""
    require(
        len(y.shape) == 2 and y.shape == order.shape and order.dtype is I32, "needs a number for each choice"
    )
    return Spec(y.shape, floats(y))


@gradient(put_choices)
def _(node: Node, dx: Tensor):
    return take_choices(dx, node.sources[1]), None


@op()
def sum_choices(y: Spec, order: Spec) -> Spec:
    """Return the sum of each row's choices: (rows, k, n), (rows, k) -> (rows, n)."""
    require(len(y.shape) == 3 and y.shape[:2] == order.shape and order.dtype is I32, "needs rows of choices")
    return Spec((y.shape[0], y.shape[2]), floats(y))


@gradient(sum_choices)
def _(node: Node, dx: Tensor):
    return spread_rows(dx, node.sources[1]), None


@op()
def spread_rows(x: Spec, order: Spec) -> Spec:
    """Return the row of each sorted choice: (rows, n), (rows, k) -> (rows, k, n)."""
    require(
        len(x.shape) == len(order.shape) == 2 and x.shape[0] == order.shape[0], "needs choices of each row"
    )
    require(order.dtype is I32, "choices must be i32")
    return Spec((*order.shape, x.shape[1]), floats(x))


@gradient(spread_rows)
def _(node: Node, dy: Tensor):
    return sum_choices(dy, node.sources[1]), None


# ---- a number for each row ---------------------------------------------------------------------


@op(in_place=((0, 0),), is_cheap=True)
def scale_rows(x: Spec, by: Spec) -> Spec:
    """Return each row times its number: (..., n), and (...) or (..., 1) -> (..., n)."""
    rows = x.shape[:-1]
    require(len(x.shape) > 0 and by.shape in (rows, (*rows, 1)), "needs a number for each row")
    return Spec(x.shape, floats(x, by))


@gradient(scale_rows)
def _(node: Node, dy: Tensor):
    x, by = node.sources
    return scale_rows(dy, by), dot_rows(dy, x) if len(by.shape) < len(x.shape) else sum_rows(mul(dy, x))


@op()
def dot_rows(a: Spec, b: Spec) -> Spec:
    """Return the dot product of each two rows: (..., n), (..., n) -> (...)."""
    require(len(a.shape) > 0 and a.shape == b.shape, "needs two sources of one shape")
    return Spec(a.shape[:-1], floats(a, b))


@gradient(dot_rows)
def _(node: Node, d: Tensor):
    a, b = node.sources
    return scale_rows(b, d), scale_rows(a, d)


# ---- products ----------------------------------------------------------------------------------


def choices_shape(x: Spec, order: Spec, ends: Spec) -> tuple[int, ...]:
    """Check rows or sorted choices, and return the axes of choices."""
    require(len(order.shape) == 2 and order.dtype is ends.dtype is I32, "needs an order and ends in i32")
    require(len(ends.shape) == 1, "needs an end for each expert")
    require(
        x.shape[:-1] in (order.shape, order.shape[:1]),
        f"needs rows for choices {list(order.shape)}, not {list(x.shape)}",
    )
    return order.shape


def expert_product(x: Spec, w: Spec, order: Spec, ends: Spec, axis: int) -> Spec:
    """Return the spec of a product with a stack of weights, which sums over an axis of them."""
    choices = choices_shape(x, order, ends)
    require(
        len(w.shape) == 3 and w.shape[:1] == ends.shape, f"needs a weight for each of {ends.shape[0]} experts"
    )
    require(x.shape[-1] == w.shape[axis], f"{x.shape[-1]} does not match {w.shape[axis]}")
    kinds = {each.dtype for each in (x, w) if not isinstance(each.dtype, QuantizedType)}
    dtype = F32 if kinds <= {BF16, F32} else floats(*(each for each in (x, w) if each.dtype in kinds))
    return Spec((*choices, w.shape[3 - axis]), dtype)


def shared_rows(grad: Tensor, x: Tensor, order: Tensor) -> Tensor:
    """Return the gradient of x by that of sorted choices, if x has a row for all choices of each row."""
    return grad if len(x.shape) == 3 else sum_choices(grad, order)


def before_spread(dy: Tensor) -> Tensor:
    """Return the rows that a gradient repeats for choices, which products read as they are; or the gradient."""
    return dy.node.sources[0] if dy.node and dy.node.op is spread_rows else dy


@op(quantized_source=1, rounded_sources=(0, 1))
def expert_matmul(x: Spec, w: Spec, order: Spec, ends: Spec) -> Spec:
    """Return each choice times the weight of its expert, x wᵀ: rows or choices of `in` -> (rows, k, out)."""
    return expert_product(x, w, order, ends, 2)


@gradient(expert_matmul)
def _(node: Node, dy: Tensor):
    x, w, order, ends = node.sources
    dy = before_spread(dy)
    to_x = shared_rows(expert_matmul_nn(dy, w, order, ends), x, order)
    return to_x, expert_out_prod(dy, x, order, ends), None, None


@op(quantized_source=1, rounded_sources=(0, 1))
def expert_matmul_nn(y: Spec, w: Spec, order: Spec, ends: Spec) -> Spec:
    """Return each choice times the weight of its expert, y w: rows or choices of `out` -> (rows, k, in)."""
    return expert_product(y, w, order, ends, 1)


@gradient(expert_matmul_nn)
def _(node: Node, dx: Tensor):
    y, w, order, ends = node.sources
    dx = before_spread(dx)
    to_y = shared_rows(expert_matmul(dx, w, order, ends), y, order)
    return to_y, expert_out_prod(y, dx, order, ends), None, None


@op(rounded_sources=(0, 1))
def expert_out_prod(a: Spec, b: Spec, order: Spec, ends: Spec) -> Spec:
    """Return aᵀ b of each expert's choices: rows or choices of n and of k -> (E, n, k)."""
    for each in (a, b):
        choices_shape(each, order, ends)
    kinds = {a.dtype, b.dtype}
    return Spec((*ends.shape, a.shape[-1], b.shape[-1]), F32 if kinds <= {BF16, F32} else floats(a, b))


@gradient(expert_out_prod)
def _(node: Node, d: Tensor):
    a, b, order, ends = node.sources
    to_a = shared_rows(expert_matmul(b, d, order, ends), a, order)
    to_b = shared_rows(expert_matmul_nn(a, d, order, ends), b, order)
    return to_a, to_b, None, None
