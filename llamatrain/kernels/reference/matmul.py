"""What the ops of `graph/ops/products.py` do to arrays, in the same order."""

import numpy as np

from llamatrain.kernels.reference.registry import kernel, operands


@kernel
def matmul(x, w, bias=None):
    x, w = operands(x, w)
    y = x @ np.swapaxes(w, -1, -2)
    return y if bias is None else y + bias


@kernel
def matmul_nn(y, w):
    y, w = operands(y, w)
    return y @ w


@kernel
def out_prod(a, b):
    a, b = operands(a, b)
    return np.swapaxes(a, -1, -2) @ b
