"""Reference kernels of `graph/ops/recurrent.py`, in the same order."""

import numpy as np

from llamatrain.kernels.reference.registry import kernel


def visible_taps(starts, taps):
    """Yield, for each tap, its distance to the past and which tokens see that far: (B, T, 1)."""
    positions = np.arange(starts.shape[1])
    for tap in range(taps):
        distance = taps - 1 - tap
        yield tap, distance, (positions - distance >= np.maximum(starts, 0))[..., None]


def shift(x, distance):
    """Return x of `distance` tokens before; zero where there is none."""
    out = np.zeros_like(x)
    if distance < x.shape[1]:
        out[:, distance:] = x[:, : x.shape[1] - distance]
    return out


@kernel
def causal_conv(x, w, starts):
    """Convolve each channel of x over time with its own taps; the last tap belongs to the token itself."""
    return sum(
        np.where(seen, shift(x, distance), 0) * w[:, tap]
        for tap, distance, seen in visible_taps(starts, w.shape[1])
    )


@kernel
def causal_conv_back(dy, w, starts):
    """Return the gradient of x."""
    dx = np.zeros_like(dy)
    for tap, distance, seen in visible_taps(starts, w.shape[1]):
        if distance < dy.shape[1]:
            dx[:, : dy.shape[1] - distance] += (np.where(seen, dy, 0) * w[:, tap])[:, distance:]
    return dx


@kernel
def causal_conv_weight_back(dy, x, starts, *, taps):
    """Return the gradient of w."""
    parts = [
        (np.where(seen, shift(x, distance), 0) * dy).sum((0, 1))
        for _, distance, seen in visible_taps(starts, taps)
    ]
    return np.stack(parts, -1)


@kernel
def causal_conv_step(state, x, w, *, into=False):
    """Convolve tokens behind a state (B, taps - 1, channels), the tokens before; return the new state, too."""
    rows, taps, length = np.concatenate([state, x], axis=1), w.shape[1], x.shape[1]
    out = sum(rows[:, tap : tap + length] * w[:, tap] for tap in range(taps))
    return rows[:, length:], out


# ---- gated delta rule ------------------------------------------------------


def repeat_heads(x, heads):
    """Repeat key heads for all value heads: value head h reads the key head h modulo their number."""
    return np.tile(x, (1, 1, heads // x.shape[2], 1))


def sum_repeated(x, heads):
    """Sum over the value heads that read a key head."""
    batch, length, repeated, size = x.shape
    return x.reshape(batch, length, repeated // heads, heads, size).sum(2)


def delta_step(state, q, k, v, g, beta, correct):
    """Process one token: state (B, H, d, e), q and k (B, H, d), v (B, H, e). Return the state and the output."""
    state = state * np.exp(g)[..., None, None]
    change = beta[..., None] * (v - np.einsum("bhd,bhde->bhe", k, state) if correct else v)
    state = state + k[..., None] * change[..., None, :]
    return state, np.einsum("bhd,bhde->bhe", q, state)


def forget_others(state, starts, t):
    """Return the state with which token t begins: 0 at the start of a sample."""
    return np.where((starts[:, t] >= t)[:, None, None, None], 0, state)


def run_delta(q, k, v, g, beta, starts, correct):
    """Return the outputs, and the state behind the tokens before each token."""
    batch, length, heads, width = v.shape
    q, k = repeat_heads(q, heads), repeat_heads(k, heads)
    before = np.zeros((length, batch, heads, q.shape[3], width), v.dtype)
    state, out = before[0], np.empty_like(v)
    for t in range(length):
        before[t] = state
        state = forget_others(state, starts, t)
        state, out[:, t] = delta_step(state, q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], correct)
    return out, before


@kernel
def gated_delta_rule(q, k, v, g, beta, starts, *, chunk=64, correct=True):
    """Return the outputs of all tokens, and the state behind the tokens before each chunk."""
    out, before = run_delta(q, k, v, g, beta, starts, correct)
    return out, np.moveaxis(before[::chunk], 0, 1)


@kernel
def gated_delta_rule_back(dout, q, k, v, g, beta, starts, states, *, chunk=64, correct=True):
    """Return the gradients of q, k, v, g and beta."""
    key_heads, heads = q.shape[2], v.shape[2]
    q, k = repeat_heads(q, heads), repeat_heads(k, heads)
    _, before = run_delta(q, k, v, g, beta, starts, correct)
    dq, dk, dv, dg, dbeta = (np.zeros_like(x) for x in (q, k, v, g, beta))
    dstate = np.zeros_like(before[0])
    for t in reversed(range(v.shape[1])):
        decay = np.exp(g[:, t])[..., None, None]
        decayed = forget_others(before[t], starts, t) * decay
        error = v[:, t] - np.einsum("bhd,bhde->bhe", k[:, t], decayed) if correct else v[:, t]
        change = beta[:, t, :, None] * error
        after = decayed + k[:, t, :, :, None] * change[..., None, :]
        dq[:, t] = np.einsum("bhe,bhde->bhd", dout[:, t], after)
        dafter = dstate + q[:, t, :, :, None] * dout[:, t, :, None, :]
        dchange = np.einsum("bhd,bhde->bhe", k[:, t], dafter)
        dbeta[:, t] = (dchange * error).sum(-1)
        dv[:, t] = beta[:, t, :, None] * dchange
        dk[:, t] = np.einsum("bhe,bhde->bhd", change, dafter)
        ddecayed = dafter
        if correct:
            dk[:, t] -= np.einsum("bhe,bhde->bhd", dv[:, t], decayed)
            ddecayed = dafter - k[:, t, :, :, None] * dv[:, t, :, None, :]
        dg[:, t] = (ddecayed * decayed).sum((-1, -2))
        dstate = forget_others(ddecayed * decay, starts, t)
    return sum_repeated(dq, key_heads), sum_repeated(dk, key_heads), dv, dg, dbeta


@kernel
def gated_delta_step(state, q, k, v, g, beta, *, correct=True, into=False):
    """Process tokens from a state (B, H, d, e); return the new state and the outputs."""
    q, k, out = repeat_heads(q, v.shape[2]), repeat_heads(k, v.shape[2]), np.empty_like(v)
    for t in range(v.shape[1]):
        state, out[:, t] = delta_step(state, q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], correct)
    return state, out
