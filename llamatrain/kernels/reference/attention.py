"""Reference kernels of `graph/ops/attention.py`, in the same order."""

import numpy as np

from llamatrain.kernels.reference.activations import apply_cap
from llamatrain.kernels.reference.registry import from_bf16, kernel, operands


def visible_keys(q, k, starts, lasts=None, *, window):
    """Return which key each query sees: (B, 1, T, S)."""
    length, keys = q.shape[1], k.shape[1]
    if lasts is None:
        lasts = np.broadcast_to(np.arange(length) + keys - length, starts.shape)
    if window:
        starts = np.maximum(starts, lasts - (window - 1))
    key = np.arange(keys)
    return ((key >= starts[..., None]) & (key <= lasts[..., None]))[:, None]


def split_heads(x, heads):
    """Transpose (B, S, Hk, d) to (B, H, S, d), repeating key/value heads for their group."""
    return np.repeat(np.swapaxes(x, 1, 2), heads // x.shape[2], axis=1)


def attention_scores(q, k, scale, cap):
    """Return the scaled and capped scores: (B, H, T, S)."""
    return apply_cap(
        split_heads(q, q.shape[2]) @ np.swapaxes(split_heads(k, q.shape[2]), -1, -2) * q.dtype.type(scale),
        cap,
    )


@kernel
def flash_attn(q, k, v, *ranges, scale, window=0, cap=0.0):
    """Return softmax(scale · q kᵀ) v and the log of the softmax's sums."""
    q, k, v = operands(q, k, v)
    scores = np.where(
        visible_keys(q, k, *ranges, window=window), attention_scores(q, k, scale, cap), q.dtype.type(-np.inf)
    )
    top = np.max(scores, axis=-1, keepdims=True)
    e = np.exp(scores - np.where(top == -np.inf, 0, top))
    total = np.sum(e, axis=-1, keepdims=True)
    out = e @ split_heads(v, q.shape[2]) / np.where(total == 0, 1, total)
    return np.swapaxes(out, 1, 2), (np.log(total) + top)[..., 0]


@kernel
def flash_attn_back(dout, q, k, v, out, lse, *ranges, scale, window=0, cap=0.0):
    """Return the gradients of q, k and v."""
    q, k, v = operands(q, k, v)
    heads, group = q.shape[2], q.shape[2] // k.shape[2]
    seen, scores = visible_keys(q, k, *ranges, window=window), attention_scores(q, k, scale, cap)
    p = np.where(seen, np.exp(np.where(seen, scores, 0) - np.where(np.isinf(lse), 0, lse)[..., None]), 0)
    dout, out = (
        split_heads(dout, heads),
        split_heads(from_bf16(out) if out.dtype == np.uint16 else out, heads),
    )
    dp = dout @ np.swapaxes(split_heads(v, heads), -1, -2)
    ds = p * (dp - np.sum(dout * out, axis=-1, keepdims=True)) * q.dtype.type(scale)
    if cap:
        ds *= 1 - np.square(scores / q.dtype.type(cap))
    dq = ds @ split_heads(k, heads)
    dk, dv = np.swapaxes(ds, -1, -2) @ split_heads(q, heads), np.swapaxes(p, -1, -2) @ dout
    return np.swapaxes(dq, 1, 2), sum_groups(dk, group), sum_groups(dv, group)


def sum_groups(x, group):
    """Transpose (B, H, S, d) to (B, S, Hk, d), summing over the heads of each group."""
    batch, heads, keys, size = x.shape
    return np.swapaxes(x.reshape(batch, heads // group, group, keys, size).sum(axis=2), 1, 2)
