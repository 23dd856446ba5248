"""Reference kernels of `graph/ops/rope.py`, in the same order."""

import numpy as np

from llamatrain.kernels.reference.registry import kernel


def rotate(x, positions, table, direction, halves):
    """Rotate pairs by the table's angles, forward (1) or backward (-1)."""
    table = table if halves else np.swapaxes(table, 1, 2)
    pairs = table.shape[2]
    cos, sin = (table[positions][:, :, None, part] for part in (0, 1))  # (B, T, 1, pairs)
    one, other = (
        (np.s_[..., :pairs], np.s_[..., pairs : 2 * pairs])
        if halves
        else (np.s_[..., part : 2 * pairs : 2] for part in (0, 1))
    )
    out = x.copy()
    out[one] = x[one] * cos - direction * x[other] * sin
    out[other] = direction * x[one] * sin + x[other] * cos
    return out


@kernel
def rope(x, positions, table, *, halves=False):
    """Rotate heads by their positions."""
    return rotate(x, positions, table, 1, halves)


@kernel
def rope_back(dy, positions, table, *, halves=False):
    """Rotate back."""
    return rotate(dy, positions, table, -1, halves)
