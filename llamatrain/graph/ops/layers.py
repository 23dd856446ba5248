"""The ops of a llama: norm, gates, rotation, attention, losses, and the optimizer's step. Fused where that pays.

Kernels of the same names stand in the same order in `kernels/reference/layers.py`. A `_back` op is a gradient in one piece;
gradients of those are not there where nobody needs them, and each says so.
"""

import math

from llamatrain.graph.ops import floats, product, require
from llamatrain.graph.tensor import BF16, F32, I32, OPS, Misfit, Node, Quantised, Shape, Spec, Tensor, gradient, op

# ---- normalisation: y = x / rms(x) · w over the last axis, rms(x) = sqrt(mean(x²) + eps) ----


@op(in_place=((0, 0),))
def rms_norm(x: Spec, w: Spec, *, eps: float) -> Spec:
    require(len(w.shape) == 1 and x.shape[-1:] == w.shape, "needs one weight for each element of a row")
    return Spec(x.shape, floats(x, w))


@gradient(rms_norm)
def _(node: Node, dy: Tensor):
    x, w = node.sources
    return rms_norm_back(dy, x, w, eps=node.attrs["eps"])


@op(in_place=((0, 0), (0, 1)))
def rms_norm_back(dy: Spec, x: Spec, w: Spec, *, eps: float) -> tuple[Spec, Spec]:
    require(dy.shape == x.shape and x.shape[-1:] == w.shape, "needs dy like x, and one weight for each element of a row")
    return Spec(x.shape, floats(dy, x, w)), w


# ---- gates: silu(x) = x · sigmoid(x), swiglu(gate, up) = silu(gate) · up ----


@op(in_place=((0, 0),))
def silu(x: Spec) -> Spec:
    return Spec(x.shape, floats(x))


@gradient(silu)
def _(node: Node, dy: Tensor):
    return (silu_back(dy, node.sources[0]),)


@op(in_place=((0, 0), (0, 1)))
def silu_back(dy: Spec, x: Spec) -> Spec:
    require(dy.shape == x.shape, "needs dy like x")
    return Spec(x.shape, floats(dy, x))


@op(in_place=((0, 0), (0, 1)))
def swiglu(gate: Spec, up: Spec) -> Spec:
    require(gate.shape == up.shape, "needs two sources of one shape")
    return gate if gate.dtype is up.dtype is BF16 else Spec(gate.shape, floats(gate, up))


@gradient(swiglu)
def _(node: Node, dy: Tensor):
    return swiglu_back(dy, *node.sources)


@op(in_place=((0, 1), (1, 2), (0, 0), (1, 0)))
def swiglu_back(dy: Spec, gate: Spec, up: Spec) -> tuple[Spec, Spec]:
    """Both gradients; bf16 where gate and up are, of a dy in full precision."""
    require(dy.shape == gate.shape == up.shape, "needs three sources of one shape")
    if gate.dtype is up.dtype is BF16:
        require(dy.dtype is F32, "needs dy in f32")
        return gate, up
    return Spec(gate.shape, floats(dy, gate, up)), Spec(up.shape, up.dtype)


# ---- dropout: which elements are left out follows from a key, a salt and their places, so that it can be made again ----


@op(in_place=((0, 0),))
def dropout(x: Spec, key: Spec, *, rate: float, salt: int) -> Spec:
    """x with a share of its elements zero, and the others as much larger."""
    require(key.dtype is I32 and key.shape == (2,), "needs a key of two i32")
    require(0 <= rate < 1 and x.shape != () and math.prod(x.shape) < 1 << 32, f"cannot leave out {rate} of x")
    return Spec(x.shape, floats(x))


@gradient(dropout)
def _(node: Node, dy: Tensor):
    return dropout(dy, node.sources[1], **node.attrs), None


# ---- rotation: pairs (x[2i], x[2i+1]) by the angle that the table has for the position ----


def _rope(x: Spec, positions: Spec, table: Spec) -> Spec:
    require(len(x.shape) == 4 and positions.shape == x.shape[:2], "needs x (B, T, H, d) and positions (B, T)")
    require(positions.dtype is I32, "positions must be i32")
    require(len(table.shape) == 3 and table.shape[2] == 2, "needs a table (positions, pairs, 2) of cosines and sines")
    require(2 * table.shape[1] <= x.shape[3], "the table has more pairs than a head")
    return Spec(x.shape, floats(x, table))


@op(in_place=((0, 0),))
def rope(x: Spec, positions: Spec, table: Spec) -> Spec:
    return _rope(x, positions, table)


@gradient(rope)
def _(node: Node, dy: Tensor):
    return rope_back(dy, *node.sources[1:]), None, None


@op(in_place=((0, 0),))
def rope_back(dy: Spec, positions: Spec, table: Spec) -> Spec:
    """The rotation back."""
    return _rope(dy, positions, table)


@gradient(rope_back)
def _(node: Node, d: Tensor):
    return rope(d, *node.sources[1:]), None, None


# ---- softmax over the last axis --------------------------------------------


@op(in_place=((0, 0),))
def soft_max(x: Spec) -> Spec:
    require(len(x.shape) > 0, "needs an axis")
    return Spec(x.shape, floats(x))


@gradient(soft_max)
def _(node: Node, dy: Tensor):
    return (soft_max_back(dy, node.outputs[0]),)


@op(in_place=((0, 0), (0, 1)))
def soft_max_back(dy: Spec, y: Spec) -> Spec:
    require(dy.shape == y.shape, "needs dy like y")
    return Spec(y.shape, floats(dy, y))


# ---- attention -------------------------------------------------------------
# Query i of a row sees the keys starts[i] to lasts[i]; without lasts, to its own place, counted from the end of the keys.
# The head h of H reads the key and value head h // (H / Hk). O(T) memory: lse, the log of the softmax's sum, is kept.


def _attention(q: Spec, k: Spec, v: Spec, *ranges: Spec) -> None:
    require(len(q.shape) == len(k.shape) == 4 and k.shape == v.shape, "needs q (B, T, H, d), k and v (B, S, Hk, d)")
    require(q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3], "q and k differ in batch or head size")
    require(k.shape[2] > 0 and q.shape[2] % k.shape[2] == 0, f"{q.shape[2]} heads do not divide among {k.shape[2]}")
    require(len({q.dtype, k.dtype, v.dtype}) == 1 and q.dtype is not I32, "q, k and v must be of one float type")
    require(1 <= len(ranges) <= 2, "needs starts, and may have lasts")
    require(0 not in k.shape[1:] or 0 in q.shape, "needs keys")
    for each in ranges:
        require(each.dtype is I32 and each.shape == q.shape[:2], "starts and lasts must be i32 (B, T)")
    require(len(ranges) == 2 or k.shape[1] >= q.shape[1], "fewer keys than queries: say with lasts what each may see")


@op()
def flash_attn(q: Spec, k: Spec, v: Spec, *ranges: Spec, scale: float) -> tuple[Spec, Spec]:
    _attention(q, k, v, *ranges)
    (batch, length, heads, _), dtype = q.shape, F32 if q.dtype is BF16 else q.dtype
    return Spec(q.shape, dtype), Spec((batch, heads, length), dtype)


@gradient(flash_attn)
def _(node: Node, dout: Tensor | None, dlse: Tensor | None):
    if dout is None or dlse is not None:
        raise Misfit("there is no gradient through lse")
    q, k, v, *ranges = node.sources
    grads = flash_attn_back(dout, q, k, v, *node.outputs, *ranges, scale=node.attrs["scale"])
    return (*grads, *(None for _ in ranges))


@op()
def flash_attn_back(dout: Spec, q: Spec, k: Spec, v: Spec, out: Spec, lse: Spec, *ranges: Spec, scale: float):
    _attention(q, k, v, *ranges)
    dtype = floats(dout, lse) if out.dtype is BF16 is q.dtype else floats(dout, out, lse)
    require(dout.shape == out.shape == q.shape, "needs dout and out like q")
    require(lse.shape == (q.shape[0], q.shape[2], q.shape[1]), "needs lse as (B, H, T)")
    return tuple(Spec(source.shape, dtype) for source in (q, k, v))


# ---- losses: sums over rows, each by its weight ----------------------------
# Targets are ids, one a row (negative: none), or rows of a distribution.


def _targets(logits: Shape, targets: Spec, weights: Spec) -> None:
    require(len(logits) == 2, "needs rows of logits")
    rows, words = logits
    ids = targets.dtype is I32 and targets.shape == (rows,)
    require(ids or targets.shape == (rows, words), "needs an i32 id or a distribution for each row as its target")
    require(weights.shape == (rows,), "needs a weight for each row")


@op()
def cross_entropy_loss(logits: Spec, targets: Spec, weights: Spec) -> Spec:
    _targets(logits.shape, targets, weights)
    return Spec((), floats(logits, weights))


@gradient(cross_entropy_loss)
def _(node: Node, dloss: Tensor):
    return cross_entropy_loss_back(dloss, *node.sources), None, None


@op(in_place=((0, 1),))
def cross_entropy_loss_back(dloss: Spec, logits: Spec, targets: Spec, weights: Spec) -> Spec:
    require(dloss.shape == (), "needs one number as dloss")
    _targets(logits.shape, targets, weights)
    return Spec(logits.shape, floats(dloss, logits, weights))


@op(blocks=1)
def linear_cross_entropy(x: Spec, w: Spec, targets: Spec, weights: Spec) -> Spec:
    """cross_entropy_loss(x wᵀ, targets, weights), chunk by chunk: all the logits are never there."""
    require(len(x.shape) == len(w.shape) == 2 and 0 not in w.shape, "needs rows and a matrix")
    logits = product(x, w, x.shape[0], w.shape[0], (x.shape[1], w.shape[1]))
    require(targets.dtype is I32, "needs ids as targets")
    _targets(logits.shape, targets, weights)
    return Spec((), weights.dtype)


@gradient(linear_cross_entropy, selective=True)
def _(node: Node, dloss: Tensor, *, wanted: tuple[bool, ...]):
    _loss, *grads = linear_cross_entropy_back(dloss, *node.sources, dx=wanted[0], dw=wanted[1])
    dx = grads.pop(0) if wanted[0] else None
    return dx, grads.pop(0) if wanted[1] else None, None, None


@op(value=0, blocks=2)
def linear_cross_entropy_back(dloss: Spec, x: Spec, w: Spec, targets: Spec, weights: Spec, *, dx: bool, dw: bool):
    """The loss and its gradients in one pass."""
    require(dx or dw, "no gradient is wanted")
    require(not dw or not isinstance(w.dtype, Quantised), "there is no gradient of a quantised weight")
    require(dloss.shape == (), "needs one number as dloss")
    (loss,) = linear_cross_entropy.specs_of(x, w, targets, weights)
    return (loss, *(Spec(source.shape, loss.dtype) for source, asked in ((x, dx), (w, dw)) if asked))


# ---- the optimizer's step, in place ----------------------------------------
# schedule: rate, 1 - beta1^t, 1 - beta2^t; factor multiplies the gradient (1, or what clipping leaves).


@op(aliases={0: 0, 1: 1, 2: 2})
def opt_step_adamw(w: Spec, m: Spec, v: Spec, g: Spec, schedule: Spec, factor: Spec, *, beta1: float, beta2: float,
                   eps: float, decay: float):  # fmt: skip
    require(w.shape == m.shape == v.shape == g.shape, "needs moments and gradient like the weight")
    require(schedule.shape == (3,) and factor.shape == (), "needs a schedule (3,) and a factor ()")
    floats(w, m, v, g, schedule, factor)
    return w, m, v


@op(aliases={0: 0, 1: 1})
def opt_step_sgd(w: Spec, m: Spec, g: Spec, schedule: Spec, factor: Spec, *, momentum: float, decay: float):
    require(w.shape == m.shape == g.shape, "needs momentum and gradient like the weight")
    require(schedule.shape == (3,) and factor.shape == (), "needs a schedule (3,) and a factor ()")
    floats(w, m, g, schedule, factor)
    return w, m


@op()
def clip_factor(*squares: Spec, limit: float) -> tuple[Spec, Spec]:
    """From sums of squares: min(1, limit / norm), and the norm itself. No limit: 0."""
    require(len(squares) > 0 and all(each.shape == () for each in squares), "needs sums of squares")
    return Spec((), floats(*squares)), Spec((), floats(*squares))


for name in ("rms_norm_back", "silu_back", "swiglu_back", "soft_max_back", "flash_attn_back", "cross_entropy_loss_back",
             "linear_cross_entropy_back"):  # fmt: skip
    OPS[name].no_gradient = "it is a gradient itself, and second derivatives are not there"
for name in ("opt_step_adamw", "opt_step_sgd", "clip_factor"):
    OPS[name].no_gradient = "it belongs to the optimizer"
OPS["fill"].no_gradient = "it has no sources"
