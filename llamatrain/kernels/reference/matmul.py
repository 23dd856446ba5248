"""Reference kernels of `graph/ops/matmul.py`, in the same order."""

import numpy as np

from llamatrain.kernels.reference.registry import kernel, operands


@kernel
def matmul(x, w, bias=None):
    """Return x wᵀ plus the bias in each row: (m, k), (n, k), (n,) -> (m, n)."""
    x, w = operands(x, w)
    y = x @ np.swapaxes(w, -1, -2)
    return y if bias is None else y + bias


@kernel
def matmul_nn(y, w):
    """Return y w: (m, n), (n, k) -> (m, k)."""
    y, w = operands(y, w)
    return y @ w


@kernel
def matmul_add(y, x, w):
    """Return y + x wᵀ."""
    return y + matmul(x, w)


@kernel
def matmul_nn_add(y, x, w):
    """Return y + x w."""
    return y + matmul_nn(x, w)


@kernel
def out_prod(a, b):
    """Return aᵀ b: (t, n), (t, k) -> (n, k)."""
    a, b = operands(a, b)
    return np.swapaxes(a, -1, -2) @ b
