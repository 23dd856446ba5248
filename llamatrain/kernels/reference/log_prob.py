"""What the ops of `graph/ops/odds.py` do to arrays, in the same order."""

import numpy as np

from llamatrain.graph.ops.log_prob import MAX_LOG_PROB
from llamatrain.kernels.reference.registry import kernel


@kernel
def softplus(x):
    return np.logaddexp(x.dtype.type(0), x)


@kernel
def log_odds(x):
    x = np.minimum(x, x.dtype.type(MAX_LOG_PROB))
    return x - np.log(-np.expm1(x))


@kernel
def log_odds_back(dy, x):
    return -dy / np.expm1(np.minimum(x, x.dtype.type(MAX_LOG_PROB)))


@kernel
def detached(x):
    return x
