"""Reference kernels of `graph/ops/movement.py`, in the same order."""

import numpy as np

from llamatrain.graph.tensor import BF16, F32, DType
from llamatrain.kernels.reference.registry import from_bf16, kernel, to_bf16


@kernel
def fill(*, shape, value, dtype: DType = F32):
    """Return an array filled with one number."""
    return np.full(shape, value, dtype.numpy)


@kernel
def cast(x, *, dtype: DType):
    """Convert x to another type."""
    full = from_bf16(x) if x.dtype == np.uint16 else x
    return to_bf16(full) if dtype is BF16 else full.astype(dtype.numpy)


@kernel
def cont(x):
    """Copy x to C order."""
    return x


def to_slices(slices):
    """Return (start, stop, step) tuples as slices."""
    return tuple(slice(*each) for each in slices)


@kernel
def split_columns(x, *, sizes):
    """Split x into parts of these numbers of columns."""
    return tuple(np.split(x, np.cumsum(sizes)[:-1], axis=-1))


@kernel
def join_columns(*parts, dtype=None):
    """Concatenate the columns of the parts, optionally in another type."""
    whole = np.concatenate(parts, axis=-1)
    return cast(whole, dtype=dtype) if dtype else whole


@kernel
def acc(x, y, *, slices, into=False):
    """Return x with y added to a part of it."""
    out = x.copy()
    out[to_slices(slices)] += y
    return out
