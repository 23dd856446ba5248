"""What the ops of `graph/ops/rope.py` do to arrays, in the same order."""

from llamatrain.kernels.reference.registry import kernel


def rotate(x, positions, table, direction):
    pairs = table.shape[1]
    cos, sin = (table[positions][:, :, None, :, part] for part in (0, 1))  # (B, T, 1, pairs)
    even, odd = x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    out = x.copy()
    out[..., 0 : 2 * pairs : 2] = even * cos - direction * odd * sin
    out[..., 1 : 2 * pairs : 2] = direction * even * sin + odd * cos
    return out


@kernel
def rope(x, positions, table):
    return rotate(x, positions, table, 1)


@kernel
def rope_back(dy, positions, table):
    return rotate(dy, positions, table, -1)
