"""Layers with a state instead of keys and values: a short causal convolution, and the gated delta rule.

`starts` has, for each token, the first token of its sample; a sample sees nothing of what precedes it in its
row. The `_step` ops are for decoding: they continue from a state and replace it.

The gated delta rule (Yang et al. 2024) has for each head a matrix S that maps keys to values. Token t does

    S = exp(g_t) S;   S = S + k_t (beta_t (v_t - k_tᵀ S))ᵀ;   o_t = q_tᵀ S

Value head h reads the key head h modulo the number of key heads. With correct=False, the state's own value for
a key is not subtracted, S = S + k_t (beta_t v_t)ᵀ: that is gated linear attention, the scan of Mamba 2 (Dao and
Gu 2024), where q, k and beta are named C, B and dt.
"""

from llamatrain.graph.ops.shape_rules import SECOND, floats, require
from llamatrain.graph.tensor import I32, Node, ShapeError, Spec, Tensor, gradient, op

CHUNK = 64  # tokens that are processed at a time
MAX_CHUNK = 256

# ---- convolution -----------------------------------------------------------


def _check_conv(x: Spec, w: Spec, starts: Spec) -> None:
    require(len(x.shape) == 3 and x.shape[1] > 0, "needs x (B, T, channels)")
    require(len(w.shape) == 2 and w.shape[0] == x.shape[2] and w.shape[1] > 0, "needs w (channels, taps)")
    require(starts.dtype is I32 and starts.shape == x.shape[:2], "starts must be i32 (B, T)")


@op()
def causal_conv(x: Spec, w: Spec, starts: Spec) -> Spec:
    """Convolve each channel of x over time with its own taps; the last tap belongs to the token itself."""
    _check_conv(x, w, starts)
    return Spec(x.shape, floats(x, w))


@gradient(causal_conv, selective=True)
def _(node: Node, dy: Tensor, *, wanted: tuple[bool, ...]):
    x, w, starts = node.sources
    dx = causal_conv_back(dy, w, starts) if wanted[0] else None
    dw = causal_conv_weight_back(dy, x, starts, taps=w.shape[1]) if wanted[1] else None
    return dx, dw, None


@op()
def causal_conv_back(dy: Spec, w: Spec, starts: Spec) -> Spec:
    """Return the gradient of x."""
    _check_conv(dy, w, starts)
    return Spec(dy.shape, floats(dy, w))


@gradient(causal_conv_back)
def _(node: Node, d: Tensor):
    dy, w, starts = node.sources
    return causal_conv(d, w, starts), causal_conv_weight_back(dy, d, starts, taps=w.shape[1]), None


@op()
def causal_conv_weight_back(dy: Spec, x: Spec, starts: Spec, *, taps: int) -> Spec:
    """Return the gradient of w."""
    w = Spec((x.shape[-1], taps), floats(dy, x))
    require(dy.shape == x.shape, "needs dy like x")
    _check_conv(x, w, starts)
    return w


@gradient(causal_conv_weight_back)
def _(node: Node, d: Tensor):
    dy, x, starts = node.sources
    return causal_conv(x, d, starts), causal_conv_back(dy, d, starts), None


@op(no_gradient="it is for decoding")
def causal_conv_step(state: Spec, x: Spec, w: Spec, *, into: bool = False) -> tuple[Spec, Spec]:
    """Convolve tokens behind a state (B, taps - 1, channels), the tokens before; return the new state, too."""
    require(
        len(x.shape) == 3 and len(w.shape) == 2 and x.shape[2:] == w.shape[:1], "needs x (B, T, channels)"
    )
    require(state.shape == (x.shape[0], w.shape[1] - 1, x.shape[2]), "needs a state (B, taps - 1, channels)")
    return Spec(state.shape, floats(state, x, w)), x


# ---- gated delta rule ------------------------------------------------------


def _check_heads(q: Spec, k: Spec, v: Spec, g: Spec, beta: Spec) -> None:
    require(
        len(q.shape) == len(v.shape) == 4 and q.shape == k.shape,
        "needs q and k (B, T, Hk, d), v (B, T, H, e)",
    )
    require(v.shape[:2] == q.shape[:2], "q and v differ in batch or length")
    require(
        q.shape[2] > 0 and v.shape[2] % q.shape[2] == 0,
        f"{v.shape[2]} value heads do not divide among {q.shape[2]} key heads",
    )
    require(g.shape == beta.shape == v.shape[:3], "needs g and beta (B, T, H)")


def _check_delta(q: Spec, k: Spec, v: Spec, g: Spec, beta: Spec, starts: Spec, chunk: int) -> None:
    _check_heads(q, k, v, g, beta)
    require(q.shape[1] > 0 and starts.shape == q.shape[:2], "starts must be (B, T)")
    require(starts.dtype is I32, "starts must be i32")
    require(
        isinstance(chunk, int) and 16 <= chunk <= MAX_CHUNK and chunk % 16 == 0,
        f"needs a chunk of 16 to {MAX_CHUNK} tokens, in steps of 16, not {chunk!r}",
    )


@op()
def gated_delta_rule(
    q: Spec,
    k: Spec,
    v: Spec,
    g: Spec,
    beta: Spec,
    starts: Spec,
    *,
    chunk: int = CHUNK,
    correct: bool = True,
) -> tuple[Spec, Spec]:
    """Return the outputs of all tokens, and the state behind the tokens before each chunk."""
    _check_delta(q, k, v, g, beta, starts, chunk)
    (batch, length, heads, width), dtype = v.shape, floats(q, k, v, g, beta)
    states = (batch, -(-length // chunk), heads, q.shape[3], width)
    return Spec(v.shape, dtype), Spec(states, dtype)


@gradient(gated_delta_rule)
def _(node: Node, dout: Tensor | None, dstates: Tensor | None):
    if dout is None or dstates is not None:
        raise ShapeError("there is no gradient through the states")
    return *gated_delta_rule_back(dout, *node.sources, node.outputs[1], **node.attrs), None


@op(no_gradient=SECOND)
def gated_delta_rule_back(
    dout: Spec,
    q: Spec,
    k: Spec,
    v: Spec,
    g: Spec,
    beta: Spec,
    starts: Spec,
    states: Spec,
    *,
    chunk: int = CHUNK,
    correct: bool = True,
) -> tuple[Spec, ...]:
    """Return the gradients of q, k, v, g and beta."""
    out, expected = gated_delta_rule.infer_specs(q, k, v, g, beta, starts, chunk=chunk)
    require(dout == out and states == expected, "needs dout like v, and the states of the forward pass")
    return q, k, v, g, beta


@op(no_gradient="it is for decoding")
def gated_delta_step(
    state: Spec,
    q: Spec,
    k: Spec,
    v: Spec,
    g: Spec,
    beta: Spec,
    *,
    correct: bool = True,
    into: bool = False,
) -> tuple[Spec, Spec]:
    """Process tokens from a state (B, H, d, e); return the new state and the outputs."""
    _check_heads(q, k, v, g, beta)
    require(
        state.shape == (v.shape[0], v.shape[2], q.shape[3], v.shape[3]), "needs a matrix for each value head"
    )
    return Spec(state.shape, floats(state, q, k, v, g, beta)), v
