"""Reference kernels of `graph/ops/softmax.py`, in the same order."""

import numpy as np

from llamatrain.kernels.reference.registry import kernel


@kernel
def soft_max(x):
    """Return the softmax of x."""
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return e / np.sum(e, axis=-1, keepdims=True)


@kernel
def soft_max_back(dy, y):
    """Return the gradient of x, given the output y."""
    return y * (dy - np.sum(dy * y, axis=-1, keepdims=True))
