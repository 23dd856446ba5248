"""Reference kernels of `graph/ops/optimizer.py`, in the same order."""

import numpy as np

from llamatrain.kernels.reference.registry import kernel
from llamatrain.kernels.reference.rows import get_rows_back


@kernel
def opt_rows(dy, ids, *, rows):
    """Return get_rows_back without its zero rows, and for each row of the weight its index or -1."""
    ids, places, found = (
        ids.ravel(),
        np.full(rows, -1, np.int32),
        np.zeros((ids.size, dy.shape[-1]), dy.dtype),
    )
    places[ids[::-1]] = np.arange(ids.size)[::-1]  # the first of duplicate numbers
    found[places[places >= 0]] = get_rows_back(dy, ids, rows=rows)[places >= 0]
    return found.reshape(dy.shape), places


def expand_rows(g, places):
    """Return a gradient in its weight's shape, from its nonzero rows and their places."""
    if places is None:
        return g
    rows = g.reshape(-1, g.shape[-1])
    return np.concatenate([rows, np.zeros_like(rows, shape=(1, rows.shape[1]))])[places]


@kernel
def opt_sum_sqr(g, places):
    """Return sum_sqr of the full gradient whose rows these are."""
    return np.sum(np.square(expand_rows(g, places), dtype=np.float64))


@kernel
def opt_step_adamw(w, m, v, g, schedule, factor, places=None, *, beta1, beta2, eps, decay):
    """Update a weight and its moments as torch.optim.AdamW does."""
    kind = w.dtype.type
    rate, bias1, bias2 = schedule
    g = expand_rows(g, places) * factor
    m = m * kind(beta1) + g * kind(1 - beta1)
    v = v * kind(beta2) + g * g * kind(1 - beta2)
    w = w * (1 - rate * kind(decay)) - (rate / bias1) * m / (np.sqrt(v) / np.sqrt(bias2) + kind(eps))
    return w, m, v


@kernel
def opt_step_sgd(w, m, g, schedule, factor, places=None, *, momentum, decay):
    """Update a weight and its momentum as torch.optim.SGD does, with decoupled weight decay."""
    kind = w.dtype.type
    rate = schedule[0]
    m = m * kind(momentum) + expand_rows(g, places) * factor
    return w * (1 - rate * kind(decay)) - rate * m, m


@kernel
def opt_momentum(m, g, factor, *, momentum):
    """Return the decayed momentum plus the gradient."""
    return m * m.dtype.type(momentum) + g * factor


@kernel
def opt_ahead(m, g, factor, *, momentum):
    """Return the decayed momentum plus the gradient once more: the lookahead of Nesterov."""
    return opt_momentum(m, g, factor, momentum=momentum)


@kernel
def opt_unit(x, squares, *, eps):
    """Return x divided by its norm, given the sum of its squares."""
    return x / (np.sqrt(squares) + x.dtype.type(eps))


@kernel
def opt_blend(x, y, *, a, b):
    """Return a x + b y."""
    return x * x.dtype.type(a) + y * x.dtype.type(b)


@kernel
def opt_adapt(v, x, *, beta, eps):
    """Return the moving average of x², and x divided by its root."""
    kind = x.dtype.type
    v = v * kind(beta) + x * x * kind(1 - beta)
    return v, x / (np.sqrt(v) + kind(eps))


@kernel
def opt_step(w, change, schedule, *, by, decay):
    """Return the decayed weight minus the change times the rate and `by`."""
    kind, rate = w.dtype.type, schedule[0]
    return w * (1 - rate * kind(decay)) - rate * kind(by) * change


@kernel
def clip_factor(*squares, limit):
    """Return min(1, limit / norm) and the norm, from sums of squares. A limit of 0 means none."""
    norm = np.sqrt(np.sum([square.astype(np.float64) for square in squares]))
    return (min(1.0, limit / (norm + 1e-6)) if limit and np.isfinite(norm) else 1.0), norm
