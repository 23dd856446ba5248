"""What the ops of `graph/ops/optimizer.py` do to arrays, in the same order."""

import numpy as np

from llamatrain.kernels.reference.registry import kernel
from llamatrain.kernels.reference.rows import get_rows_back


@kernel
def opt_rows(dy, ids, *, rows):
    ids, places, found = (
        ids.ravel(),
        np.full(rows, -1, np.int32),
        np.zeros((ids.size, dy.shape[-1]), dy.dtype),
    )
    places[ids[::-1]] = np.arange(ids.size)[::-1]  # of rows with the same number the first
    found[places[places >= 0]] = get_rows_back(dy, ids, rows=rows)[places >= 0]
    return found.reshape(dy.shape), places


def expand_rows(g, places):
    if places is None:
        return g
    rows = g.reshape(-1, g.shape[-1])
    return np.concatenate([rows, np.zeros_like(rows, shape=(1, rows.shape[1]))])[places]


@kernel
def opt_sum_sqr(g, places):
    return np.sum(np.square(expand_rows(g, places), dtype=np.float64))


@kernel
def opt_step_adamw(w, m, v, g, schedule, factor, places=None, *, beta1, beta2, eps, decay):
    kind = w.dtype.type
    rate, bias1, bias2 = schedule
    g = expand_rows(g, places) * factor
    m = m * kind(beta1) + g * kind(1 - beta1)
    v = v * kind(beta2) + g * g * kind(1 - beta2)
    w = w * (1 - rate * kind(decay)) - (rate / bias1) * m / (np.sqrt(v) / np.sqrt(bias2) + kind(eps))
    return w, m, v


@kernel
def opt_step_sgd(w, m, g, schedule, factor, places=None, *, momentum, decay):
    kind = w.dtype.type
    rate = schedule[0]
    m = m * kind(momentum) + expand_rows(g, places) * factor
    return w * (1 - rate * kind(decay)) - rate * m, m


@kernel
def opt_momentum(m, g, factor, *, momentum):
    return m * m.dtype.type(momentum) + g * factor


@kernel
def opt_ahead(m, g, factor, *, momentum):
    return opt_momentum(m, g, factor, momentum=momentum)


@kernel
def opt_unit(x, squares, *, eps):
    return x / (np.sqrt(squares) + x.dtype.type(eps))


@kernel
def opt_blend(x, y, *, a, b):
    return x * x.dtype.type(a) + y * x.dtype.type(b)


@kernel
def opt_step(w, change, schedule, *, by, decay):
    kind, rate = w.dtype.type, schedule[0]
    return w * (1 - rate * kind(decay)) - rate * kind(by) * change


@kernel
def clip_factor(*squares, limit):
    norm = np.sqrt(np.sum([square.astype(np.float64) for square in squares]))
    return (min(1.0, limit / (norm + 1e-6)) if limit and np.isfinite(norm) else 1.0), norm
