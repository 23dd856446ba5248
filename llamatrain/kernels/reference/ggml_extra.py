"""Reference kernels of `graph/ops/ggml_extra.py`, in the same order."""

import math

import numpy as np

from llamatrain.graph.tensor import DType
from llamatrain.kernels.reference.movement import cast, to_slices
from llamatrain.kernels.reference.registry import from_bf16, kernel, to_bf16


@kernel
def add1(a, b):
    """Return a plus the one number in b."""
    return a + b.reshape(())


@kernel
def neg(x):
    """Return -x."""
    return -x


@kernel
def abs(x):
    """Return the absolute value of x."""
    return np.abs(x)


@kernel
def sgn(x):
    """Return the sign of x: -1, 0 or 1."""
    return np.sign(x)


@kernel
def div(a, b):
    """Return a / b with broadcasting."""
    return a / b


@kernel
def sqrt(x):
    """Return the square root of x."""
    return np.sqrt(x)


@kernel
def log(x):
    """Return the natural logarithm of x."""
    return np.log(x)


@kernel
def sin(x):
    """Return the sine of x."""
    return np.sin(x)


@kernel
def cos(x):
    """Return the cosine of x."""
    return np.cos(x)


@kernel
def add_cast(a, b, *, dtype: DType):
    """Return a + b in another type; a may be of lower precision than b."""
    return cast(add_in_float32(a, b), dtype=dtype)


def add_in_float32(a, b):
    """Return a + b, with bf16 sources converted to float32."""
    return (from_bf16(a) if a.dtype == np.uint16 else a) + (from_bf16(b) if b.dtype == np.uint16 else b)


@kernel
def mean(x):
    """Return the mean of all elements."""
    return np.mean(x, dtype=np.float64)


@kernel
def diag(x):
    """Return a matrix with x on its diagonal: (..., 1, n) -> (..., n, n)."""
    return x * np.eye(x.shape[-1], dtype=x.dtype)


def is_above_diagonal(x, past):
    """Return where column > row + past."""
    rows, columns = x.shape[-2:]
    return np.arange(columns) > np.arange(rows)[:, None] + past


@kernel
def diag_mask_inf(x, *, past=0):
    """Set elements to -inf where column > row + past."""
    return np.where(is_above_diagonal(x, past), x.dtype.type(-math.inf), x)


@kernel
def diag_mask_zero(x, *, past=0):
    """Set elements to 0 where column > row + past."""
    return np.where(is_above_diagonal(x, past), x.dtype.type(0), x)


@kernel
def cpy(x, y, *, into=False):
    """Return y in the shape and type of x; with `into`, in x's memory."""
    if x.dtype == y.dtype:
        return y
    return to_bf16(y) if x.dtype == np.uint16 else (from_bf16(y) if y.dtype == np.uint16 else y)


@kernel
def set(x, y, *, slices, into=False):
    """Return x with a part replaced by y."""
    out = x.copy()
    out[to_slices(slices)] = y
    return out
