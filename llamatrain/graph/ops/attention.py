"""Attention.

Query i of a row sees the keys starts[i] to lasts[i]; without lasts, up to its own position, counted from the
end of the keys. A window w > 0 limits this to the last w keys. With a cap c > 0, a scaled score s becomes c
tanh(s / c). Head h of H reads the key/value head h // (H / Hk). Memory is O(T): lse, the log of the softmax's
sum, is kept.
"""

from llamatrain.graph.ops.activations import add_number
from llamatrain.graph.ops.arithmetic import sub
from llamatrain.graph.ops.experts import dot_rows, scale_rows
from llamatrain.graph.ops.ggml_extra import div
from llamatrain.graph.ops.movement import cont, permute
from llamatrain.graph.ops.shape_rules import SECOND, capped, floats, require
from llamatrain.graph.tensor import BF16, F32, I32, Node, ShapeError, Spec, Tensor, gradient, op

SMALLEST_SQUARE = 1e-37  # added to squares that something is divided by


def _attention(q: Spec, k: Spec, v: Spec, *ranges: Spec, window: int, cap: float) -> None:
    require(
        isinstance(window, int) and window >= 0,
        f"needs a whole number of keys as the window, not {window!r}; 0: no window",
    )
    capped(cap)
    require(
        len(q.shape) == len(k.shape) == 4 and k.shape == v.shape,
        "needs q (B, T, H, d), k and v (B, S, Hk, d)",
    )
    require(q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3], "q and k differ in batch or head size")
    require(
        k.shape[2] > 0 and q.shape[2] % k.shape[2] == 0,
        f"{q.shape[2]} heads do not divide among {k.shape[2]}",
    )
    require(
        len({q.dtype, k.dtype, v.dtype}) == 1 and q.dtype is not I32, "q, k and v must be of one float type"
    )
    require(1 <= len(ranges) <= 2, "needs starts, and may have lasts")
    require(0 not in k.shape[1:] or 0 in q.shape, "needs keys")
    for each in ranges:
        require(each.dtype is I32 and each.shape == q.shape[:2], "starts and lasts must be i32 (B, T)")
    require(
        len(ranges) == 2 or k.shape[1] >= q.shape[1],
        "fewer keys than queries: say with lasts what each may see",
    )


@op(rounded_sources=(0, 1, 2), masked_outputs=(1,), bf16_outputs=(0,))
def flash_attn(
    q: Spec, k: Spec, v: Spec, *ranges: Spec, scale: float, window: int = 0, cap: float = 0.0
) -> tuple[Spec, Spec]:
    """Return softmax(scale · q kᵀ) v and the log of the softmax's sums."""
    _attention(q, k, v, *ranges, window=window, cap=cap)
    (batch, length, heads, _), dtype = q.shape, F32 if q.dtype is BF16 else q.dtype
    return Spec(q.shape, dtype), Spec((batch, heads, length), dtype)


@gradient(flash_attn)
def _(node: Node, dout: Tensor | None, dlse: Tensor | None):
    if dout is None:
        raise ShapeError("there is no gradient through lse alone")
    (q, k, v, *ranges), (out, lse) = node.sources, node.outputs
    out = out if dlse is None else include_lse_gradient(out, dout, dlse)
    grads = flash_attn_back(dout, q, k, v, out, lse, *ranges, **node.attrs)
    return (*grads, *(None for _ in ranges))


def include_lse_gradient(out: Tensor, dout: Tensor, dlse: Tensor) -> Tensor:
    """Return what stands for out in `flash_attn_back`, so that the gradient of lse is included.

    That op only needs the sum of dout · out in each row, and dlse is subtracted from it. Where dout is zero, dlse
    must be zero, too.
    """
    squares = add_number(dot_rows(dout, dout), SMALLEST_SQUARE)
    return sub(out, scale_rows(dout, div(rows_of_lse(dlse), squares)))


def rows_of_lse(lse: Tensor) -> Tensor:
    """Return numbers (B, H, T) in the order of the rows of attention, (B, T, H)."""
    return cont(permute(lse, axes=(0, 2, 1)))


@op(rounded_sources=(1, 2, 3, 4), no_gradient=SECOND, bf16_sources=(0,), bf16_outputs=(0, 1, 2))
def flash_attn_back(
    dout: Spec,
    q: Spec,
    k: Spec,
    v: Spec,
    out: Spec,
    lse: Spec,
    *ranges: Spec,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
):
    """Return the gradients of q, k and v."""
    _attention(q, k, v, *ranges, window=window, cap=cap)
    dtype = floats(dout, lse) if out.dtype is BF16 is q.dtype else floats(dout, out, lse)
    require(dout.shape == out.shape == q.shape, "needs dout and out like q")
    require(lse.shape == (q.shape[0], q.shape[2], q.shape[1]), "needs lse as (B, H, T)")
    return tuple(Spec(source.shape, dtype) for source in (q, k, v))
