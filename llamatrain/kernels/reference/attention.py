"""What the ops of `graph/ops/attention.py` do to arrays, in the same order."""

import numpy as np

from llamatrain.kernels.reference.registry import from_bf16, kernel, operands


def visible(q, k, starts, lasts=None):
    """(B, 1, T, S): which key each query sees."""
    length, keys = q.shape[1], k.shape[1]
    if lasts is None:
        lasts = np.broadcast_to(np.arange(length) + keys - length, starts.shape)
    key = np.arange(keys)
    return ((key >= starts[..., None]) & (key <= lasts[..., None]))[:, None]


def by_head(x, heads):
    """(B, S, Hk, d) -> (B, H, S, d), key and value heads repeated for their group."""
    return np.repeat(np.swapaxes(x, 1, 2), heads // x.shape[2], axis=1)


def attention_scores(q, k, scale, seen):
    """(B, H, T, S)"""
    scores = by_head(q, q.shape[2]) @ np.swapaxes(by_head(k, q.shape[2]), -1, -2) * q.dtype.type(scale)
    return np.where(seen, scores, q.dtype.type(-np.inf))


@kernel
def flash_attn(q, k, v, *ranges, scale):
    q, k, v = operands(q, k, v)
    scores = attention_scores(q, k, scale, visible(q, k, *ranges))
    top = np.max(scores, axis=-1, keepdims=True)
    e = np.exp(scores - np.where(top == -np.inf, 0, top))
    total = np.sum(e, axis=-1, keepdims=True)
    out = e @ by_head(v, q.shape[2]) / np.where(total == 0, 1, total)
    return np.swapaxes(out, 1, 2), (np.log(total) + top)[..., 0]


@kernel
def flash_attn_back(dout, q, k, v, out, lse, *ranges, scale):
    q, k, v = operands(q, k, v)
    heads, group = q.shape[2], q.shape[2] // k.shape[2]
    seen = visible(q, k, *ranges)
    p = np.where(seen, np.exp(attention_scores(q, k, scale, seen) - np.where(np.isinf(lse), 0, lse)[..., None]), 0)
    dout, out = by_head(dout, heads), by_head(from_bf16(out) if out.dtype == np.uint16 else out, heads)
    dp = dout @ np.swapaxes(by_head(v, heads), -1, -2)
    ds = p * (dp - np.sum(dout * out, axis=-1, keepdims=True)) * q.dtype.type(scale)
    dq = ds @ by_head(k, heads)
    dk, dv = np.swapaxes(ds, -1, -2) @ by_head(q, heads), np.swapaxes(p, -1, -2) @ dout
    return np.swapaxes(dq, 1, 2), ungroup(dk, group), ungroup(dv, group)


def ungroup(x, group):
    """(B, H, S, d) -> (B, S, Hk, d), summed over the heads of each group."""
    batch, heads, keys, size = x.shape
    return np.swapaxes(x.reshape(batch, heads // group, group, keys, size).sum(axis=2), 1, 2)
