"""A llama in plain torch, from nothing but its weights by their GGUF names: head by head, no fusion, no modules."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Numbers:
    heads: int
    kv_heads: int
    eps: float = 1e-5
    base: float = 10000.0


Weights = dict[str, Tensor]
Row = Mapping[str, np.ndarray]


def weights_of(arrays: Mapping[str, np.ndarray]) -> Weights:
    return {name: torch.tensor(array, requires_grad=True) for name, array in arrays.items()}


def normed(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain


def rotated(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """(B, T, d): the pair (2i, 2i + 1) as a complex number turns by position * base^(-2i/d)."""
    turns = base ** (-torch.arange(0, x.shape[-1], 2, dtype=torch.float64) / x.shape[-1])
    angles = positions.double()[..., None] * turns
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles).to(pairs.dtype)).flatten(
        -2
    )


def attention(x: Tensor, w: Weights, at: str, n: Numbers, given: Mapping[str, Tensor]) -> Tensor:
    """Head by head."""
    q, k, v = (x @ w[f"{at}.attn_{name}.weight"].T for name in "qkv")
    size = q.shape[-1] // n.heads
    place = torch.arange(x.shape[1])
    seen = (place <= place[:, None]) & (place >= given["starts"][..., None])  # (B, T, T)
    out = []
    for head in range(n.heads):
        mine, theirs = (slice(i * size, (i + 1) * size) for i in (head, head // (n.heads // n.kv_heads)))
        turned_q, turned_k = (
            rotated(each, given["positions"], n.base) for each in (q[..., mine], k[..., theirs])
        )
        scores = (turned_q @ turned_k.mT / math.sqrt(size)).masked_fill(~seen, -torch.inf)
        out.append(scores.softmax(-1) @ v[..., theirs])
    return torch.cat(out, -1) @ w[f"{at}.attn_output.weight"].T


def logits(w: Weights, n: Numbers, rows: Sequence[Row], outputs: list[Tensor] | None = None) -> Tensor:
    """(B, T, vocabulary), for rows of one length. The output of each block is appended to `outputs`."""
    given = {
        name: torch.tensor(np.stack([row[name] for row in rows]))
        for name in ("tokens", "positions", "starts")
    }
    x = w["token_embd.weight"][given["tokens"]]
    for layer in range(sum(name.endswith("attn_q.weight") for name in w)):
        at = f"blk.{layer}"
        x = x + attention(normed(x, w[f"{at}.attn_norm.weight"], n.eps), w, at, n, given)
        y = normed(x, w[f"{at}.ffn_norm.weight"], n.eps)
        gate, up = (y @ w[f"{at}.ffn_{name}.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ w[f"{at}.ffn_down.weight"].T
        if outputs is not None:
            outputs.append(x)
    return normed(x, w["output_norm.weight"], n.eps) @ w.get("output.weight", w["token_embd.weight"]).T


def loss(w: Weights, n: Numbers, rows: Sequence[Row]) -> Tensor:
    """The mean over all tokens that are trained, of all rows together."""
    targets, weights = (
        torch.tensor(np.stack([row[name] for row in rows])) for name in ("targets", "weights")
    )
    each = F.cross_entropy(logits(w, n, rows).flatten(0, 1), targets.flatten(), reduction="none")
    return (each * weights.flatten()).sum() / weights.sum()


class Trainer:
    """AdamW as it was published, with the gradient's norm cut to `clip` (0: left alone), decay for matrices alone."""

    def __init__(self, w: Weights, clip: float, decay: float = 0.1) -> None:
        self.w, self.clip = w, clip
        groups = [{"params": [p for p in w.values() if p.ndim > 1], "weight_decay": decay}]
        groups.append({"params": [p for p in w.values() if p.ndim < 2], "weight_decay": 0.0})
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8)

    def step(self, n: Numbers, rows: Sequence[Row], rate: float) -> tuple[float, float]:
        """The loss and the gradient's norm before the update."""
        self.optimizer.zero_grad()
        value = loss(self.w, n, rows)
        value.backward()
        grads = [p.grad for p in self.w.values() if p.grad is not None]
        norm = float(torch.stack([g.square().sum() for g in grads]).sum().sqrt())
        if self.clip and norm > self.clip:
            for g in grads:
                g *= self.clip / norm
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return float(value.detach()), norm
