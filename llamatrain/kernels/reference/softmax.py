"""What the ops of `graph/ops/softmax.py` do to arrays, in the same order."""

import numpy as np

from llamatrain.kernels.reference.registry import kernel


@kernel
def soft_max(x):
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return e / np.sum(e, axis=-1, keepdims=True)


@kernel
def soft_max_back(dy, y):
    return y * (dy - np.sum(dy * y, axis=-1, keepdims=True))
