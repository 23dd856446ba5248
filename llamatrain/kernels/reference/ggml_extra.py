"""What the ops of `graph/ops/ancestors.py` do to arrays, in the same order."""

import math

import numpy as np

from llamatrain.graph.tensor import DType
from llamatrain.kernels.reference.movement import cast, to_slices
from llamatrain.kernels.reference.registry import from_bf16, kernel, to_bf16


@kernel
def add1(a, b):
    return a + b.reshape(())


@kernel
def neg(x):
    return -x


@kernel
def abs(x):
    return np.abs(x)


@kernel
def sgn(x):
    return np.sign(x)


@kernel
def div(a, b):
    return a / b


@kernel
def sqrt(x):
    return np.sqrt(x)


@kernel
def log(x):
    return np.log(x)


@kernel
def add_cast(a, b, *, dtype: DType):
    return cast(add_in_float32(a, b), dtype=dtype)


def add_in_float32(a, b):
    return (from_bf16(a) if a.dtype == np.uint16 else a) + (from_bf16(b) if b.dtype == np.uint16 else b)


@kernel
def mean(x):
    return np.mean(x, dtype=np.float64)


@kernel
def diag(x):
    return x * np.eye(x.shape[-1], dtype=x.dtype)


def is_above_diagonal(x, past):
    rows, columns = x.shape[-2:]
    return np.arange(columns) > np.arange(rows)[:, None] + past


@kernel
def diag_mask_inf(x, *, past=0):
    return np.where(is_above_diagonal(x, past), x.dtype.type(-math.inf), x)


@kernel
def diag_mask_zero(x, *, past=0):
    return np.where(is_above_diagonal(x, past), x.dtype.type(0), x)


@kernel
def cpy(x, y, *, into=False):
    if x.dtype == y.dtype:
        return y
    return to_bf16(y) if x.dtype == np.uint16 else (from_bf16(y) if y.dtype == np.uint16 else y)


@kernel
def set(x, y, *, slices, into=False):
    out = x.copy()
    out[to_slices(slices)] = y
    return out
