"""What the ops of `graph/ops/movement.py` do to arrays, in the same order; views move nothing."""

import numpy as np

from llamatrain.graph.tensor import BF16, F32, DType
from llamatrain.kernels.blocks import Blocks
from llamatrain.kernels.reference.registry import from_bf16, kernel, to_bf16

# ---- copies, and parts written into a whole --------------------------------


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
    rows = w.rows(ids) if isinstance(w, Blocks) else w[ids]
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
