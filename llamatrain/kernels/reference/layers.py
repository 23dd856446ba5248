"""What the ops of `graph/layers.py` do to arrays, in the same order."""

import numpy as np

from llamatrain.kernels.reference.registry import from_bf16, kernel, operands, to_bf16

# ---- normalisation ---------------------------------------------------------


def root_mean_square(x, eps):
    return np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(eps))


@kernel
def rms_norm(x, w, *, eps):
    return x / root_mean_square(x, eps) * w


@kernel
def rms_norm_back(dy, x, w, *, eps):
    rms = root_mean_square(x, eps)
    normal, dnormal = x / rms, dy * w
    dx = (dnormal - normal * np.mean(dnormal * normal, axis=-1, keepdims=True)) / rms
    return dx, np.sum((dy * normal).reshape(-1, x.shape[-1]), axis=0)


# ---- gates -----------------------------------------------------------------


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@kernel
def silu(x):
    return x * sigmoid(x)


@kernel
def silu_back(dy, x):
    s = sigmoid(x)
    return dy * s * (1 + x * (1 - s))


@kernel
def swiglu(gate, up):
    if gate.dtype == np.uint16:
        return to_bf16(swiglu(from_bf16(gate), from_bf16(up)))
    return silu(gate) * up


@kernel
def swiglu_back(dy, gate, up):
    if gate.dtype == np.uint16:
        return tuple(to_bf16(each) for each in swiglu_back(dy, from_bf16(gate), from_bf16(up)))
    return silu_back(dy * up, gate), dy * silu(gate)


# ---- dropout ---------------------------------------------------------------


def mixed(z):
    """Bits of a 32-bit number spread over all of it (the finaliser of MurmurHash3)."""
    z = (z ^ (z >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    z = (z ^ (z >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return z ^ (z >> np.uint32(16))


@kernel
def dropout(x, key, *, rate, salt):
    seeds = np.array([salt, *key.view(np.uint32)], np.uint32)
    start = mixed(mixed(mixed(seeds[:1]) + seeds[1:2]) + seeds[2:3])
    drawn = mixed(np.arange(x.size, dtype=np.uint32) * np.uint32(0x9E3779B9) + start).reshape(x.shape)
    return np.where(drawn < np.uint32(rate * 2**32), 0, x * x.dtype.type(1 / (1 - rate)))


# ---- rotation --------------------------------------------------------------


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


# ---- softmax ---------------------------------------------------------------


@kernel
def soft_max(x):
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return e / np.sum(e, axis=-1, keepdims=True)


@kernel
def soft_max_back(dy, y):
    return y * (dy - np.sum(dy * y, axis=-1, keepdims=True))


# ---- attention -------------------------------------------------------------


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


# ---- losses ----------------------------------------------------------------


def distribution(targets, like):
    """Rows of probabilities; a row of zeros where there is no target."""
    if targets.ndim == 2:
        return targets
    rows = np.zeros_like(like)
    there = targets >= 0
    rows[np.flatnonzero(there), targets[there]] = 1
    return rows


def log_soft_max(x):
    top = np.max(x, axis=-1, keepdims=True)
    return x - top - np.log(np.sum(np.exp(x - top), axis=-1, keepdims=True))


@kernel
def cross_entropy_loss(logits, targets, weights):
    rows = -np.sum(np.where(distribution(targets, logits) == 0, 0, distribution(targets, logits) * log_soft_max(logits)), axis=-1)
    return np.sum(rows * weights, dtype=np.float64)


@kernel
def cross_entropy_loss_back(dloss, logits, targets, weights):
    wanted = distribution(targets, logits)
    mass = np.sum(wanted, axis=-1, keepdims=True)
    return (soft_max(logits) * mass - wanted) * (weights * dloss)[:, None]


@kernel
def linear_cross_entropy(x, w, targets, weights):
    x, w = operands(x, w)
    return cross_entropy_loss(x @ w.T, targets, weights)


@kernel
def linear_cross_entropy_back(dloss, x, w, targets, weights, *, dx, dw):
    a, b = operands(x, w)
    logits = a @ b.T
    d = cross_entropy_loss_back(dloss, logits, targets, weights)
    if x.dtype == np.uint16 or w.dtype == np.uint16:
        d, _ = operands(d, np.zeros(0, np.uint16))
    grads = (d @ b if dx else None, d.T @ a if dw else None)
    return (cross_entropy_loss(logits, targets, weights), *(grad for grad in grads if grad is not None))


# ---- the optimizer's step --------------------------------------------------


@kernel
def opt_step_adamw(w, m, v, g, schedule, factor, *, beta1, beta2, eps, decay):
    kind = w.dtype.type
    rate, bias1, bias2 = schedule
    g = g * factor
    m = m * kind(beta1) + g * kind(1 - beta1)
    v = v * kind(beta2) + g * g * kind(1 - beta2)
    w = w * (1 - rate * kind(decay)) - (rate / bias1) * m / (np.sqrt(v) / np.sqrt(bias2) + kind(eps))
    return w, m, v


@kernel
def opt_step_sgd(w, m, g, schedule, factor, *, momentum, decay):
    kind = w.dtype.type
    rate = schedule[0]
    m = m * kind(momentum) + g * factor
    return w * (1 - rate * kind(decay)) - rate * m, m


@kernel
def clip_factor(*squares, limit):
    norm = np.sqrt(np.sum([square.astype(np.float64) for square in squares]))
    return (min(1.0, limit / (norm + 1e-6)) if limit and np.isfinite(norm) else 1.0), norm
