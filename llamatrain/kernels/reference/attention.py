"""What the ops of `graph/ops/attention.py` do to arrays, in the same order."""

import numpy as np

from llamatrain.kernels.reference.activations import capped
from llamatrain.kernels.reference.registry import from_bf16, kernel, operands


def visible(q, k, starts, lasts=None, *, window):
    """(B, 1, T, S): which key each query sees."""
    length, keys = q.shape[1], k.shape[1]
    if lasts is None:
        lasts = np.broadcast_to(np.arange(length) + keys - length, starts.shape)
    if window:
        starts = np.maximum(starts, lasts - (window - 1))
    key = np.arange(keys)
    return ((key >= starts[..., None]) & (key <= lasts[..., None]))[:, None]


def by_head(x, heads):
    """(B, S, Hk, d) -> (B, H, S, d), key and value heads repeated for their group."""
    return np.repeat(np.swapaxes(x, 1, 2), heads // x.shape[2], axis=1)


def attention_scores(q, k, scale, cap):
    """(B, H, T, S)"""
    return capped(
        by_head(q, q.shape[2]) @ np.swapaxes(by_head(k, q.shape[2]), -1, -2) * q.dtype.type(scale), cap
    )


@kernel
def flash_attn(q, k, v, *ranges, scale, window=0, cap=0.0):
    q, k, v = operands(q, k, v)
    scores = np.where(
        visible(q, k, *ranges, window=window), attention_scores(q, k, scale, cap), q.dtype.type(-np.inf)
    )
    top = np.max(scores, axis=-1, keepdims=True)
    e = np.exp(scores - np.where(top == -np.inf, 0, top))
    total = np.sum(e, axis=-1, keepdims=True)
    out = e @ by_head(v, q.shape[2]) / np.where(total == 0, 1, total)
    return np.swapaxes(out, 1, 2), (np.log(total) + top)[..., 0]


@kernel
def flash_attn_back(dout, q, k, v, out, lse, *ranges, scale, window=0, cap=0.0):
    q, k, v = operands(q, k, v)
    heads, group = q.shape[2], q.shape[2] // k.shape[2]
    seen, scores = visible(q, k, *ranges, window=window), attention_scores(q, k, scale, cap)
    p = np.where(seen, np.exp(np.where(seen, scores, 0) - np.where(np.isinf(lse), 0, lse)[..., None]), 0)
    dout, out = by_head(dout, heads), by_head(from_bf16(out) if out.dtype == np.uint16 else out, heads)
    dp = dout @ np.swapaxes(by_head(v, heads), -1, -2)
    ds = p * (dp - np.sum(dout * out, axis=-1, keepdims=True)) * q.dtype.type(scale)
    if cap:
        ds *= 1 - np.square(scores / q.dtype.type(cap))
    dq = ds @ by_head(k, heads)
    dk, dv = np.swapaxes(ds, -1, -2) @ by_head(q, heads), np.swapaxes(p, -1, -2) @ dout
    return np.swapaxes(dq, 1, 2), ungroup(dk, group), ungroup(dv, group)


def ungroup(x, group):
    """(B, H, S, d) -> (B, S, Hk, d), summed over the heads of each group."""
    batch, heads, keys, size = x.shape
    return np.swapaxes(x.reshape(batch, heads // group, group, keys, size).sum(axis=2), 1, 2)
