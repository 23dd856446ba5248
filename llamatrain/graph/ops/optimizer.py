"""The optimizer step, in place.

schedule: rate, 1 - beta1^t, 1 - beta2^t; factor multiplies the gradient (1, or what clipping gives). A
gradient has the shape of its weight, or consists of its nonzero rows with the `places` of the weight's rows
among them (`opt_rows`). Both give the same bits.
"""

from llamatrain.graph.ops.shape_rules import floats, require
from llamatrain.graph.tensor import I32, Spec, op

OPTIMIZER = "it belongs to the optimizer"


@op(in_place=((0, 0),), no_gradient=OPTIMIZER)
def opt_rows(dy: Spec, ids: Spec, *, rows: int) -> tuple[Spec, Spec]:
    """Return get_rows_back without its zero rows, and for each row of the weight its index or -1.

    Where an id occurs first in ids, the sum of its rows of dy is stored; later occurrences are zeros.
    """
    require(
        ids.dtype is I32 and len(dy.shape) > 0 and dy.shape[:-1] == ids.shape,
        "needs a row number for each row",
    )
    floats(dy)
    return dy, Spec((rows,), I32)


def _fits(w: Spec, g: Spec, places: Spec | None) -> None:
    if places is None:
        require(g.shape == w.shape, "needs a gradient like the weight")
        return
    require(
        places.dtype is I32 and places.shape == w.shape[:1] and len(w.shape) == 2,
        "needs a place for each row of a matrix",
    )
    require(g.shape[-1:] == w.shape[1:], "needs rows of the weight's width")


@op(no_gradient=OPTIMIZER)
def opt_sum_sqr(g: Spec, places: Spec) -> Spec:
    """Return sum_sqr of the full gradient whose rows these are."""
    require(len(g.shape) > 1, "needs rows")
    _fits(Spec((*places.shape, g.shape[-1]), g.dtype), g, places)
    return Spec((), floats(g))


@op(aliases={0: 0, 1: 1, 2: 2}, no_gradient=OPTIMIZER)
def opt_step_adamw(
    w: Spec,
    m: Spec,
    v: Spec,
    g: Spec,
    schedule: Spec,
    factor: Spec,
    places: Spec | None = None,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
):
    """Update a weight and its moments as torch.optim.AdamW does."""
    require(w.shape == m.shape == v.shape, "needs moments like the weight")
    _fits(w, g, places)
    require(schedule.shape == (3,) and factor.shape == (), "needs a schedule (3,) and a factor ()")
    floats(w, m, v, g, schedule, factor)
    return w, m, v


@op(aliases={0: 0, 1: 1}, no_gradient=OPTIMIZER)
def opt_step_sgd(
    w: Spec,
    m: Spec,
    g: Spec,
    schedule: Spec,
    factor: Spec,
    places: Spec | None = None,
    *,
    momentum: float,
    decay: float,
):
    """Update a weight and its momentum as torch.optim.SGD does, with decoupled weight decay."""
    require(w.shape == m.shape, "needs momentum like the weight")
    _fits(w, g, places)
    require(schedule.shape == (3,) and factor.shape == (), "needs a schedule (3,) and a factor ()")
    floats(w, m, g, schedule, factor)
    return w, m


def _carried(m: Spec, g: Spec, factor: Spec) -> Spec:
    require(m.shape == g.shape and factor.shape == (), "needs momentum like the gradient and a factor ()")
    return Spec(m.shape, floats(m, g, factor))


@op(aliases={0: 0}, no_gradient=OPTIMIZER)
def opt_momentum(m: Spec, g: Spec, factor: Spec, *, momentum: float) -> Spec:
    """Return the decayed momentum plus the gradient."""
    return _carried(m, g, factor)


@op(no_gradient=OPTIMIZER)
def opt_ahead(m: Spec, g: Spec, factor: Spec, *, momentum: float) -> Spec:
    """Return the decayed momentum plus the gradient once more: the lookahead of Nesterov."""
    return _carried(m, g, factor)


@op(in_place=((0, 0),), no_gradient=OPTIMIZER)
def opt_unit(x: Spec, squares: Spec, *, eps: float) -> Spec:
    """Return x divided by its norm, given the sum of its squares."""
    require(squares.shape == (), "needs a sum of squares")
    return Spec(x.shape, floats(x, squares))


@op(in_place=((0, 0), (0, 1)), no_gradient=OPTIMIZER)
def opt_blend(x: Spec, y: Spec, *, a: float, b: float) -> Spec:
    """Return a x + b y."""
    require(x.shape == y.shape, "needs two of one shape")
    return Spec(x.shape, floats(x, y))


@op(aliases={0: 0}, in_place=((1, 1),), no_gradient=OPTIMIZER)
def opt_adapt(v: Spec, x: Spec, *, beta: float, eps: float) -> tuple[Spec, Spec]:
    """Return the moving average of x², and x divided by its root."""
    require(v.shape == x.shape, "needs an average like x")
    return v, Spec(x.shape, floats(v, x))


@op(aliases={0: 0}, no_gradient=OPTIMIZER)
def opt_step(w: Spec, change: Spec, schedule: Spec, *, by: float, decay: float) -> Spec:
    """Return the decayed weight minus the change times the rate and `by`."""
    require(
        w.shape == change.shape and len(schedule.shape) == 1, "needs a change like the weight, and a schedule"
    )
    floats(w, change, schedule)
    return w


@op(no_gradient=OPTIMIZER)
def clip_factor(*squares: Spec, limit: float) -> tuple[Spec, Spec]:
    """Return min(1, limit / norm) and the norm, from sums of squares. A limit of 0 means none."""
    require(len(squares) > 0 and all(each.shape == () for each in squares), "needs sums of squares")
    return Spec((), floats(*squares)), Spec((), floats(*squares))
