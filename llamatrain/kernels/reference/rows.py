"""Reference kernels of `graph/ops/rows.py`, in the same order."""

import numpy as np

from llamatrain.kernels.quantized import Blocks
from llamatrain.kernels.reference.registry import from_bf16, kernel


@kernel
def get_rows(w, ids):
    """Return rows of w by number: (V, D), any shape -> that shape + (D,)."""
    rows = w.decode_rows(ids) if isinstance(w, Blocks) else w[ids]
    return from_bf16(rows) if rows.dtype == np.uint16 else rows


@kernel
def get_rows_back(dy, ids, *, rows):
    """Add each row of dy to the row of its number."""
    out = np.zeros((rows, dy.shape[-1]), dy.dtype)
    np.add.at(out, ids.ravel(), dy.reshape(-1, dy.shape[-1]))
    return out


@kernel
def set_rows(x, rows, ids, *, into=False):
    """Return x with rows replaced by number; of duplicate numbers, the last row wins."""
    out = x.copy()
    for row, place in zip(rows, ids, strict=True):
        out[place] = row
    return out
