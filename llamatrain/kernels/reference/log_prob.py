"""Reference kernels of `graph/ops/log_prob.py`, in the same order."""

import numpy as np

from llamatrain.graph.ops.log_prob import MAX_LOG_PROB
from llamatrain.kernels.reference.registry import kernel


@kernel
def softplus(x):
    """Return log(1 + exp(x)); softplus(-x) is -log(sigmoid(x))."""
    return np.logaddexp(x.dtype.type(0), x)


@kernel
def log_odds(x):
    """Return log(p / (1 - p)) for x = log(p)."""
    x = np.minimum(x, x.dtype.type(MAX_LOG_PROB))
    return x - np.log(-np.expm1(x))


@kernel
def log_odds_back(dy, x):
    """Return dy times the derivative of log_odds at x."""
    return -dy / np.expm1(np.minimum(x, x.dtype.type(MAX_LOG_PROB)))


@kernel
def detached(x):
    """Return x without a gradient."""
    return x
