"""What the ops of `graph/ops/optimizer.py` do to arrays, in the same order."""

import numpy as np

from llamatrain.kernels.reference.registry import kernel


@kernel
def opt_step_adamw(w, m, v, g, schedule, factor, *, beta1, beta2, eps, decay):
    kind = w.dtype.type
    rate, bias1, bias2 = schedule
    g = g * factor
    m = m * kind(beta1) + g * kind(1 - beta1)
    v = v * kind(beta2) + g * g * kind(1 - beta2)
    w = w * (1 - rate * kind(decay)) - (rate / bias1) * m / (np.sqrt(v) / np.sqrt(bias2) + kind(eps))
    return w, m, v


@kernel
def opt_step_sgd(w, m, g, schedule, factor, *, momentum, decay):
    kind = w.dtype.type
    rate = schedule[0]
    m = m * kind(momentum) + g * factor
    return w * (1 - rate * kind(decay)) - rate * m, m


@kernel
def clip_factor(*squares, limit):
    norm = np.sqrt(np.sum([square.astype(np.float64) for square in squares]))
    return (min(1.0, limit / (norm + 1e-6)) if limit and np.isfinite(norm) else 1.0), norm
