"""The same llama in plain torch, for benchmarks and tests. Modules have the GGUF names."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.random_models import Size

EPS = 1e-5


def rope_table(ctx: int, head: int, base: float = 10000.0) -> Tensor:
    """Return cosine and sine: (ctx, head / 2, 2)."""
    angles = torch.outer(torch.arange(ctx), base ** (-torch.arange(0, head // 2 * 2, 2) / head))
    return torch.stack([angles.cos(), angles.sin()], -1)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate the interleaved pairs of (B, T, H, d)."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = table[:, None].to(x.dtype).unbind(-1)  # (T, 1, d / 2)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


class Norm(nn.Module):
    """RMS norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last axis."""
        return F.rms_norm(x, self.weight.shape, self.weight, EPS)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a linear layer without a bias."""
    return nn.Linear(inputs, outputs, bias=False)


class Block(nn.Module):
    """A block of attention and feed-forward layers."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.head = size.width // size.heads
        self.attn_norm = Norm(size.width)
        self.ffn_norm = Norm(size.width)
        self.attn_q = linear(size.width, size.width)
        self.attn_k = linear(size.width, size.kv_heads * self.head)
        self.attn_v = linear(size.width, size.kv_heads * self.head)
        self.attn_output = linear(size.width, size.width)
        self.ffn_gate = linear(size.width, size.ff)
        self.ffn_up = linear(size.width, size.ff)
        self.ffn_down = linear(size.ff, size.width)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """Apply the block to (B, T, width)."""
        h = self.attn_norm(x)
        q, k, v = (
            project(h).unflatten(-1, (-1, self.head)) for project in (self.attn_q, self.attn_k, self.attn_v)
        )
        q, k = rotate(q, table), rotate(k, table)
        grouped = self.size.heads != self.size.kv_heads
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))  # (B, H, T, d)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        x = x + self.attn_output(out.transpose(1, 2).flatten(-2))
        h = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))


class TorchLlama(nn.Module):
    """The whole model."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token_embd = nn.Embedding(size.vocab, size.width)
        self.blk = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.output_norm = Norm(size.width)
        self.output = linear(size.width, size.vocab)
        self.register_buffer("table", rope_table(size.ctx, size.width // size.heads), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (B * T, vocab) of ids (B, T)."""
        x = self.token_embd(tokens)
        for block in self.blk:
            x = block(x, self.table)
        return self.output(self.output_norm(x)).flatten(0, 1)

    def loss(self, tokens: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the mean loss, or the weighted sum; targets below 0 do not count."""
        logits, targets = self(tokens), targets.long()
        if weights is None:
            return F.cross_entropy(logits, targets)
        return (F.cross_entropy(logits, targets, ignore_index=-1, reduction="none") * weights).sum()


def training_step(
    model: TorchLlama,
    tokens: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    *,
    bf16: bool,
    compiled: bool = False,
    rate: float = 1e-3,
    decay: float = 0.1,
    clip: float = 0.0,
) -> Callable[[], float]:
    """Return a step of AdamW in the fastest form that torch has; it returns the loss before the update."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    gains = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, fused=True)
    compute_loss = torch.compile(model.loss) if compiled else model.loss

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = compute_loss(tokens, targets, weights)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return loss.item()

    return step
