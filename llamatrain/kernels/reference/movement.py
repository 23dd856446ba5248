"""What the ops of `graph/ops/movement.py` do to arrays, in the same order."""

import numpy as np

from llamatrain.graph.tensor import BF16, F32, DType
from llamatrain.kernels.reference.registry import from_bf16, kernel, to_bf16


@kernel
def fill(*, shape, value, dtype: DType = F32):
    return np.full(shape, value, dtype.numpy)


@kernel
def cast(x, *, dtype: DType):
    full = from_bf16(x) if x.dtype == np.uint16 else x
    return to_bf16(full) if dtype is BF16 else full.astype(dtype.numpy)


@kernel
def cont(x):
    return x


def to_slices(slices):
    return tuple(slice(*each) for each in slices)


@kernel
def split_columns(x, *, sizes):
    return tuple(np.split(x, np.cumsum(sizes)[:-1], axis=-1))


@kernel
def join_columns(*parts, dtype=None):
    whole = np.concatenate(parts, axis=-1)
    return cast(whole, dtype=dtype) if dtype else whole


@kernel
def acc(x, y, *, slices, into=False):
    out = x.copy()
    out[to_slices(slices)] += y
    return out
