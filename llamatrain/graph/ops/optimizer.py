"""The optimizer's step, in place.

schedule: rate, 1 - beta1^t, 1 - beta2^t; factor multiplies the gradient (1, or what clipping leaves).
"""

from llamatrain.graph.ops.rules import floats, require
from llamatrain.graph.tensor import Spec, op

OPTIMIZER = "it belongs to the optimizer"


@op(aliases={0: 0, 1: 1, 2: 2}, no_gradient=OPTIMIZER)
def opt_step_adamw(
    w: Spec, m: Spec, v: Spec, g: Spec, schedule: Spec, factor: Spec, *, beta1: float, beta2: float, eps: float, decay: float
):
    require(w.shape == m.shape == v.shape == g.shape, "needs moments and gradient like the weight")
    require(schedule.shape == (3,) and factor.shape == (), "needs a schedule (3,) and a factor ()")
    floats(w, m, v, g, schedule, factor)
    return w, m, v


@op(aliases={0: 0, 1: 1}, no_gradient=OPTIMIZER)
def opt_step_sgd(w: Spec, m: Spec, g: Spec, schedule: Spec, factor: Spec, *, momentum: float, decay: float):
    require(w.shape == m.shape == g.shape, "needs momentum and gradient like the weight")
    require(schedule.shape == (3,) and factor.shape == (), "needs a schedule (3,) and a factor ()")
    floats(w, m, g, schedule, factor)
    return w, m


@op(no_gradient=OPTIMIZER)
def clip_factor(*squares: Spec, limit: float) -> tuple[Spec, Spec]:
    """From sums of squares: min(1, limit / norm), and the norm itself. No limit: 0."""
    require(len(squares) > 0 and all(each.shape == () for each in squares), "needs sums of squares")
    return Spec((), floats(*squares)), Spec((), floats(*squares))
