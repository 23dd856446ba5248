"""What the ops of `graph/ops.py` do to arrays, in the same order."""

import math

import numpy as np

from llamatrain.graph.tensor import BF16, F32, DType
from llamatrain.kernels.reference.registry import from_bf16, kernel, operands, to_bf16

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
def cast(x, *, dtype: DType):
    full = from_bf16(x) if x.dtype == np.uint16 else x
    return to_bf16(full) if dtype is BF16 else full.astype(dtype.numpy)


@kernel
def add_cast(a, b, *, dtype: DType):
    return cast(sum_of(a, b), dtype=dtype)


def sum_of(a, b):
    return (from_bf16(a) if a.dtype == np.uint16 else a) + (from_bf16(b) if b.dtype == np.uint16 else b)


@kernel
def fill(*, shape, value, dtype: DType = F32):
    return np.full(shape, value, dtype.numpy)


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


# ---- copies, and parts written into a whole --------------------------------


@kernel
def cont(x):
    return x


@kernel
def cpy(x, y, *, into=False):
    if x.dtype == y.dtype:
        return y
    return to_bf16(y) if x.dtype == np.uint16 else (from_bf16(y) if y.dtype == np.uint16 else y)


def part(slices):
    return tuple(slice(*each) for each in slices)


@kernel
def acc(x, y, *, slices, into=False):
    out = x.copy()
    out[part(slices)] += y
    return out


@kernel
def set(x, y, *, slices, into=False):
    out = x.copy()
    out[part(slices)] = y
    return out


# ---- rows by number --------------------------------------------------------


@kernel
def get_rows(w, ids):
    rows = w[ids]
    return from_bf16(rows) if rows.dtype == np.uint16 else rows


@kernel
def get_rows_back(dy, ids, *, rows):
    out = np.zeros((rows, dy.shape[-1]), dy.dtype)
    np.add.at(out, ids.ravel(), dy.reshape(-1, dy.shape[-1]))
    return out


@kernel
def set_rows(x, rows, ids, *, into=False):
    out = x.copy()
    for row, place in zip(rows, ids, strict=True):
        out[place] = row
    return out


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
