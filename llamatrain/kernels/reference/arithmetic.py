"""What the ops of `graph/ops/arithmetic.py` do to arrays, in the same order."""

import math

import numpy as np

from llamatrain.graph.tensor import DType
from llamatrain.kernels.reference.movement import cast
from llamatrain.kernels.reference.registry import from_bf16, kernel, operands

# ---- arithmetic, element by element ----------------------------------------


@kernel
def add(a, b):
    return a + b


@kernel
def add1(a, b):
    return a + b.reshape(())


@kernel
def sub(a, b):
    return a - b


@kernel
def mul(a, b):
    return a * b


@kernel
def div(a, b):
    return a / b


@kernel
def scale(x, *, by):
    return x * x.dtype.type(by)


@kernel
def sqr(x):
    return x * x


@kernel
def sqrt(x):
    return np.sqrt(x)


@kernel
def log(x):
    return np.log(x)


@kernel
def add_cast(a, b, *, dtype: DType):
    return cast(sum_of(a, b), dtype=dtype)


def sum_of(a, b):
    return (from_bf16(a) if a.dtype == np.uint16 else a) + (from_bf16(b) if b.dtype == np.uint16 else b)


# ---- sums ------------------------------------------------------------------


@kernel
def sum(x):
    return np.sum(x, dtype=np.float64)


@kernel
def sum_rows(x):
    return np.sum(x, axis=-1, keepdims=True)


@kernel
def mean(x):
    return np.mean(x, dtype=np.float64)


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


# ---- products of matrices --------------------------------------------------


@kernel
def matmul(x, w):
    x, w = operands(x, w)
    return x @ np.swapaxes(w, -1, -2)


@kernel
def matmul_nn(y, w):
    y, w = operands(y, w)
    return y @ w


@kernel
def out_prod(a, b):
    a, b = operands(a, b)
    return np.swapaxes(a, -1, -2) @ b


# ---- diagonals -------------------------------------------------------------


@kernel
def diag(x):
    return x * np.eye(x.shape[-1], dtype=x.dtype)


def beyond(x, past):
    rows, columns = x.shape[-2:]
    return np.arange(columns) > np.arange(rows)[:, None] + past


@kernel
def diag_mask_inf(x, *, past=0):
    return np.where(beyond(x, past), x.dtype.type(-math.inf), x)


@kernel
def diag_mask_zero(x, *, past=0):
    return np.where(beyond(x, past), x.dtype.type(0), x)
