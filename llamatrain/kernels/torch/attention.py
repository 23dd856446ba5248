"""Torch kernels of attention: torch's fused ones where they apply, else products and a softmax.

The fused kernels take q, k and v as (B, H, T, d) with as many heads for keys as for queries, and a bias that is
minus infinity for keys that are not seen. They have no soft cap, and no rows that see nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

from llamatrain.graph.tensor import BF16, Node
from llamatrain.kernels.torch.elementwise import Outs, apply_cap, in_full
from llamatrain.kernels.torch.matmul import has_mixed_products, multiply, operands
from llamatrain.kernels.torch.memory import zero_inputs
from llamatrain.kernels.torch.registry import kernel, writing_kernel

aten = torch.ops.aten
LSE_STEP = 32  # the efficient kernel holds the log of the sums for a multiple of this many queries
BIAS_STEP = 16  # a row of its bias begins at a multiple of this many elements


def is_fused(node: Node) -> bool:
    """Return True if a fused kernel takes the node on a device that has one."""
    first = node.op.name.endswith("_back")
    q, k = node.sources[first], node.sources[first + 1]
    return len(node.sources) == (7 if first else 4) and not node.attrs.get("cap") and q.shape[1] == k.shape[1]


def score_bytes(node: Node) -> int:
    """Return the bytes that attention needs besides its results."""
    back = node.op.name.endswith("_back")
    q, k = node.sources[back], node.sources[back + 1]
    (batch, queries, heads, size), keys = q.shape, k.shape[1]
    element = 2 if q.dtype is BF16 else 4
    scores = batch * heads * queries * keys
    if is_fused(node):
        mask = batch * queries * (keys + BIAS_STEP) * (element + 1)
        return mask + (10 if back else 5) * element * prod(q.shape) * (2 if back else 1)
    return 4 * scores * (5 if back else 3) + 4 * 4 * batch * heads * (queries + keys) * size


def visible_keys(q: Tensor, k: Tensor, starts: Tensor, lasts: Tensor | None = None, *, window: int) -> Tensor:
    """Return which key each query sees: (B, 1, T, S)."""
    length, keys = q.shape[1], k.shape[1]
    if lasts is None:
        lasts = (torch.arange(length, device=q.device) + (keys - length)).expand(starts.shape)
    if window:
        starts = torch.maximum(starts, lasts - (window - 1))
    key = torch.arange(keys, device=q.device)
    return ((key >= starts[..., None]) & (key <= lasts[..., None]))[:, None]


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Return (B, S, Hk, d) as (B, H, S, d), with key/value heads repeated for their group."""
    group = heads // x.shape[2]
    turned = x.transpose(1, 2)
    return turned if group == 1 else turned.repeat_interleave(group, dim=1)


def sum_groups(x: Tensor, group: int) -> Tensor:
    """Return (B, H, S, d) as (B, S, Hk, d), summed over the heads of each group."""
    if group == 1:
        return x.transpose(1, 2)
    return x.unflatten(1, (x.shape[1] // group, group)).sum(dim=2).transpose(1, 2)


# ---- fused -----------------------------------------------------------------


def takes_fused(q: Tensor, k: Tensor, ranges: tuple[Tensor, ...], cap: float) -> bool:
    """Return True if a fused kernel of the device computes this."""
    if len(ranges) != 1 or cap or q.shape[1] != k.shape[1]:
        return False
    if has_mixed_products(q):
        return q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and q.dtype is not torch.float64
    return q.device.type == "cpu" and q.dtype is torch.float32 and q.shape[1] > 1


def choose_bias(q: Tensor, k: Tensor, starts: Tensor, window: int) -> Tensor | None:
    """Return what is added to the scores, or None if each query sees all keys up to its own."""
    if (not window or window >= k.shape[1]) and starts in zero_inputs:
        return None
    return make_bias(visible_keys(q, k, starts, window=window), q)


def make_bias(seen: Tensor, q: Tensor) -> Tensor:
    """Return what is added to the scores: (B, H, T, S), a view with rows at aligned addresses."""
    batch, _, queries, keys = seen.shape
    width = -(-keys // BIAS_STEP) * BIAS_STEP
    whole = torch.full((batch, 1, queries, width), -torch.inf, dtype=q.dtype, device=q.device)
    whole[..., :keys].masked_fill_(seen, 0)
    return whole[..., :keys].expand(batch, q.shape[2], queries, keys)


def fused_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output as (B, H, T, d), and the log of the sums as (B, H, T)."""
    causal = bias is None
    if q.device.type == "cpu":
        forward = aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = forward(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    elif causal and q.dtype is torch.bfloat16:
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scale)[:2]
    else:
        forward = aten._scaled_dot_product_efficient_attention
        out, lse = forward(q, k, v, bias, True, 0.0, causal, scale=scale)[:2]
    return out, lse[..., : q.shape[2]]


def fused_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, scale: float
) -> Outs:
    """Return the gradients of q, k and v as (B, H, T, d)."""
    causal, length = bias is None, q.shape[2]
    if q.device.type == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads: Outs = backward(dout, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale)
        return grads
    unused = torch.empty(2, dtype=torch.int64, device=q.device)  # the state of a dropout
    with same_bits():
        if causal and q.dtype is torch.bfloat16:
            seed = unused.view(torch.uint64)
            backward = aten._scaled_dot_product_flash_attention_backward
            sizes = None, None, length, k.shape[2]
            return backward(dout, q, k, v, out, lse, *sizes, 0.0, True, seed, seed[0], scale=scale)[:3]
        padded = torch.full(
            (*lse.shape[:2], -(-length // LSE_STEP) * LSE_STEP), torch.inf, dtype=lse.dtype, device=q.device
        )
        padded[..., :length] = lse
        backward, wanted = aten._scaled_dot_product_efficient_attention_backward, [True, True, True, False]
        seed = unused[0]
        return backward(dout, q, k, v, bias, out, padded, seed, seed, 0.0, wanted, causal, scale=scale)[:3]


@contextmanager
def same_bits() -> Iterator[None]:
    """Let attention add up its gradients in a fixed order, which it does only if nothing else is tolerated."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


# ---- products and softmax --------------------------------------------------


def attention_scores(q: Tensor, k: Tensor, scale: float, cap: float) -> Tensor:
    """Return the scaled and capped scores of heads: (B, H, T, S)."""
    return apply_cap(batched(q, k.mT).mul_(scale), cap)


def batched(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of stacks of matrices in full precision."""
    dtype = torch.float32 if a.dtype is torch.bfloat16 else a.dtype
    out = torch.empty((*a.shape[:-1], b.shape[-1]), dtype=dtype, device=a.device)
    multiply(a, b, out)
    return out


@writing_kernel(score_bytes)
def flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *ranges: Tensor,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
    out: Outs,
) -> None:
    """Write softmax(scale · q kᵀ) v and the log of the softmax's sums."""
    q, k, v = operands(q, k, v)
    heads = q.shape[2]
    if takes_fused(q, k, ranges, cap):
        bias = choose_bias(q, k, ranges[0], window)
        attended, lse = fused_forward(
            split_heads(q, heads), split_heads(k, heads), split_heads(v, heads), bias, scale
        )
        out[0].copy_(attended.transpose(1, 2))
        out[1].copy_(lse)
        return
    seen = visible_keys(q, k, *ranges, window=window)
    q, k, v = (split_heads(x, heads) for x in (q, k, v))
    scores = torch.where(seen, attention_scores(q, k, scale, cap), -torch.inf)
    top = scores.amax(dim=-1, keepdim=True)
    e = torch.exp(scores - torch.where(top == -torch.inf, 0, top))
    total = e.sum(dim=-1, keepdim=True)
    attended = torch.matmul(e, v.to(e.dtype)) / torch.where(total == 0, 1, total)
    out[0].copy_(attended.transpose(1, 2))
    out[1].copy_((torch.log(total) + top)[..., 0])


@kernel(score_bytes)
def flash_attn_back(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *ranges: Tensor,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
) -> Outs:
    """Return the gradients of q, k and v."""
    q, k, v = operands(q, k, v)
    heads, group = q.shape[2], q.shape[2] // k.shape[2]
    if takes_fused(q, k, ranges, cap):
        grads = fused_backward(
            split_heads(dout.to(q.dtype), heads),
            split_heads(q, heads),
            split_heads(k, heads),
            split_heads(v, heads),
            split_heads(out.to(q.dtype), heads),
            lse,
            choose_bias(q, k, ranges[0], window),
            scale,
        )
        return grads[0].transpose(1, 2), *(sum_groups(grad, group) for grad in grads[1:])
    seen, dout = visible_keys(q, k, *ranges, window=window), in_full(dout)
    q, k, v, dout = (split_heads(x, heads).to(dout.dtype) for x in (q, k, v, dout))
    out = split_heads(out, heads).to(dout.dtype)
    scores = attention_scores(q, k, scale, cap)
    logs = torch.where(seen, scores, -torch.inf) - torch.where(torch.isinf(lse), 0, lse)[..., None]
    p = torch.exp(logs)
    ds = (torch.matmul(dout, v.mT) - (dout * out).sum(dim=-1, keepdim=True)).mul_(p).mul_(scale)
    if cap:
        ds.mul_((scores / cap).square_().neg_().add_(1))
    dk, dv = torch.matmul(ds.mT, q), torch.matmul(p.mT, dout)
    return torch.matmul(ds, k).transpose(1, 2), sum_groups(dk, group), sum_groups(dv, group)
