"""Reference kernels of `graph/ops/reduce.py`, in the same order."""

import numpy as np

from llamatrain.kernels.reference.registry import kernel


@kernel
def sum(x):
    """Return the sum of all elements."""
    return np.sum(x, dtype=np.float64)


@kernel
def sum_rows(x):
    """Return sums over the last axis, which stays with size 1."""
    return np.sum(x, axis=-1, keepdims=True)


@kernel
def sum_sqr(x):
    """Return the sum of all squares, without storing them."""
    return np.sum(np.square(x, dtype=np.float64))


@kernel
def repeat(x, *, shape):
    """Tile x to fill a shape."""
    if all(n in (1, size) for size, n in zip(shape, x.shape, strict=True)):
        return np.broadcast_to(x, shape)  # takes no memory
    return np.tile(x, [size // n for size, n in zip(shape, x.shape, strict=True)])


@kernel
def repeat_back(y, *, shape):
    """Return the sum of all copies of `shape` in y."""
    split = [part for size, n in zip(y.shape, shape, strict=True) for part in (size // n, n)]
    return y.reshape(split).sum(axis=tuple(range(0, len(split), 2)))
