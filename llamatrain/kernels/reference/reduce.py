"""What the ops of `graph/ops/sums.py` do to arrays, in the same order."""

import numpy as np

from llamatrain.kernels.reference.registry import kernel


@kernel
def sum(x):
    return np.sum(x, dtype=np.float64)


@kernel
def sum_rows(x):
    return np.sum(x, axis=-1, keepdims=True)


@kernel
def sum_sqr(x):
    return np.sum(np.square(x, dtype=np.float64))


@kernel
def repeat(x, *, shape):
    return np.tile(x, [size // n for size, n in zip(shape, x.shape, strict=True)])


@kernel
def repeat_back(y, *, shape):
    split = [part for size, n in zip(y.shape, shape, strict=True) for part in (size // n, n)]
    return y.reshape(split).sum(axis=tuple(range(0, len(split), 2)))
