"""A block of a model with the differences between architectures, for benchmarks and tests of kernels."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llamatrain.graph import ops as O
from llamatrain.graph.tensor import I32, Tensor, collect_leaves, parameter, placeholder


@dataclass
class Block:
    """A block, by default a llama's. `loss` is the sum of its squared outputs, `trained` are its weights."""

    rows: int = 2
    ctx: int = 64
    heads: int = 4
    groups: int = 2
    size: int = 16
    ff: int = 96
    halves: bool = False  # rotary pairs lie in two halves
    bias: bool = False  # on q, k and v
    fused: bool = False  # one product for q, k and v, another for both sides of the gate
    gelu: bool = False
    window: int = 0
    cap: float = 0.0
    qk_norm: bool = False
    post_norm: bool = False  # norms follow attention and feed-forward, too
    trained: list[Tensor] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.x = placeholder("x", (self.rows * self.ctx, self.width))
        self.starts, self.positions = (
            placeholder(name, (self.rows, self.ctx), I32) for name in ("starts", "positions")
        )
        self.table = placeholder(
            "table", (self.ctx, 2, self.size // 2) if self.halves else (self.ctx, self.size // 2, 2)
        )
        x = O.add(self.x, self.norm_if(self.post_norm, self.attention(self.norm(self.x))))
        self.loss = O.sum_sqr(O.add(x, self.norm_if(self.post_norm, self.feed_forward(self.norm(x)))))

    @property
    def width(self) -> int:
        """The width of the residual stream."""
        return self.heads * self.size

    def weight(self, *shape: int) -> Tensor:
        """Add a trained weight."""
        self.trained.append(parameter(f"w{len(self.trained)}", shape))
        return self.trained[-1]

    def norm(self, x: Tensor) -> Tensor:
        """Add an RMS norm."""
        return O.rms_norm(x, self.weight(x.shape[-1]), eps=1e-5)

    def norm_if(self, condition: bool, x: Tensor) -> Tensor:
        """Add an RMS norm if the block has one here."""
        return self.norm(x) if condition else x

    def linear(self, x: Tensor, out: int, bias: bool = False) -> Tensor:
        """Add a linear layer."""
        return O.matmul(x, self.weight(out, x.shape[1]), *([self.weight(out)] if bias else []))

    def attention(self, x: Tensor) -> Tensor:
        """Add the attention layer."""
        sizes = (self.width, *[self.groups * self.size] * 2)
        if self.fused:
            parts = O.split_columns(self.linear(x, sum(sizes)), sizes=sizes)
        else:
            parts = tuple(self.linear(x, size, self.bias) for size in sizes)
        q, k, v = (
            O.reshape(part, shape=(self.rows, self.ctx, part.shape[1] // self.size, self.size))
            for part in parts
        )
        q, k = (self.rotate(self.norm_if(self.qk_norm, tensor)) for tensor in (q, k))
        options: dict[str, Any] = {"window": self.window, "cap": self.cap} if self.window or self.cap else {}
        out, _ = O.flash_attn(q, k, v, self.starts, scale=self.size**-0.5, **options)
        return self.linear(O.reshape(out, shape=x.shape), self.width)

    def rotate(self, x: Tensor) -> Tensor:
        """Add rotary embeddings."""
        options: dict[str, Any] = {"halves": True} if self.halves else {}
        return O.rope(x, self.positions, self.table, **options)

    def feed_forward(self, x: Tensor) -> Tensor:
        """Add the feed-forward layer."""
        if self.fused:
            return self.linear(O.swiglu_halves(self.linear(x, 2 * self.ff)), self.width)
        gate, up = self.linear(x, self.ff), self.linear(x, self.ff)
        return self.linear((O.geglu if self.gelu else O.swiglu)(gate, up), self.width)

    def arrays(self) -> dict[Tensor, np.ndarray]:
        """Return arrays for all leaves: small weights, and two samples in the first row."""
        rng = np.random.default_rng(0)
        arrays = {}
        for leaf in collect_leaves([self.loss]):
            scale = leaf.shape[-1] ** -0.5 if leaf in self.trained and len(leaf.shape) > 1 else 1.0
            arrays[leaf] = (rng.standard_normal(leaf.shape) * scale).astype(leaf.dtype.numpy)
        arrays[self.starts][:] = 0
        arrays[self.starts][0, self.ctx // 2 :] = self.ctx // 2
        arrays[self.positions][:] = np.arange(self.ctx)
        angles = np.outer(np.arange(self.ctx), 1e4 ** (-np.arange(self.size // 2) / (self.size // 2)))
        arrays[self.table][:] = np.stack([np.cos(angles), np.sin(angles)], axis=1 if self.halves else 2)
        return arrays


# options of blocks by architecture
BLOCKS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"halves": True, "bias": True},
    "qwen3": {"halves": True, "qk_norm": True},
    "phi3": {"halves": True, "fused": True},
    "gemma2": {"halves": True, "gelu": True, "post_norm": True, "cap": 50.0, "window": 24},
    "gemma3": {"halves": True, "gelu": True, "qk_norm": True, "post_norm": True, "window": 24},
}
