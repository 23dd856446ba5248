"""What the ops of `graph/ops/rows.py` do to arrays, in the same order."""

import numpy as np

from llamatrain.kernels.quantized import Blocks
from llamatrain.kernels.reference.registry import from_bf16, kernel


@kernel
def get_rows(w, ids):
    rows = w.decode_rows(ids) if isinstance(w, Blocks) else w[ids]
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
