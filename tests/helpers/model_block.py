"""A block of a model, with what sets one architecture's apart from another's: for tests of kernels, and for the benchmark."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llamatrain.graph import ops as O
from llamatrain.graph.tensor import I32, Tensor, collect_leaves, parameter, placeholder


@dataclass
class Block:
    """A llama's, unless something is said of it. `loss` is of what goes out of it, `trained` are its weights."""

    rows: int = 2
    ctx: int = 64
    heads: int = 4
    groups: int = 2
    size: int = 16
    ff: int = 96
    halves: bool = False  # pairs that turn lie in two halves
    bias: bool = False  # of q, k and v
    fused: bool = False  # q, k and v of one product, both sides of the gate of another
    gelu: bool = False
    window: int = 0
    cap: float = 0.0
    normed: bool = False  # q and k
    behind: bool = False  # attention and gate have norms behind them, too
    trained: list[Tensor] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.x = placeholder("x", (self.rows * self.ctx, self.width))
        self.starts, self.positions = (
            placeholder(name, (self.rows, self.ctx), I32) for name in ("starts", "positions")
        )
        self.table = placeholder(
            "table", (self.ctx, 2, self.size // 2) if self.halves else (self.ctx, self.size // 2, 2)
        )
        x = O.add(self.x, self.norm_if(self.behind, self.attended(self.norm(self.x))))
        self.loss = O.sum_sqr(O.add(x, self.norm_if(self.behind, self.gated(self.norm(x)))))

    @property
    def width(self) -> int:
        return self.heads * self.size

    def weight(self, *shape: int) -> Tensor:
        self.trained.append(parameter(f"w{len(self.trained)}", shape))
        return self.trained[-1]

    def norm(self, x: Tensor) -> Tensor:
        return O.rms_norm(x, self.weight(x.shape[-1]), eps=1e-5)

    def norm_if(self, there: bool, x: Tensor) -> Tensor:
        return self.norm(x) if there else x

    def linear(self, x: Tensor, out: int, bias: bool = False) -> Tensor:
        return O.matmul(x, self.weight(out, x.shape[1]), *([self.weight(out)] if bias else []))

    def attended(self, x: Tensor) -> Tensor:
        sizes = (self.width, *[self.groups * self.size] * 2)
        if self.fused:
            parts = O.split_columns(self.linear(x, sum(sizes)), sizes=sizes)
        else:
            parts = tuple(self.linear(x, size, self.bias) for size in sizes)
        q, k, v = (
            O.reshape(part, shape=(self.rows, self.ctx, part.shape[1] // self.size, self.size))
            for part in parts
        )
        q, k = (self.turned(self.norm_if(self.normed, each)) for each in (q, k))
        how = {"window": self.window, "cap": self.cap} if self.window or self.cap else {}
        out, _ = O.flash_attn(q, k, v, self.starts, scale=self.size**-0.5, **how)
        return self.linear(O.reshape(out, shape=x.shape), self.width)

    def turned(self, x: Tensor) -> Tensor:
        return O.rope(x, self.positions, self.table, **({"halves": True} if self.halves else {}))

    def gated(self, x: Tensor) -> Tensor:
        if self.fused:
            return self.linear(O.swiglu_halves(self.linear(x, 2 * self.ff)), self.width)
        gate, up = self.linear(x, self.ff), self.linear(x, self.ff)
        return self.linear((O.geglu if self.gelu else O.swiglu)(gate, up), self.width)

    def arrays(self) -> dict[Tensor, np.ndarray]:
        """For every leaf; small weights, two samples in the first row."""
        rng, found = np.random.default_rng(0), {}
        for leaf in collect_leaves([self.loss]):
            small = leaf.shape[-1] ** -0.5 if leaf in self.trained and len(leaf.shape) > 1 else 1.0
            found[leaf] = (rng.standard_normal(leaf.shape) * small).astype(leaf.dtype.numpy)
        found[self.starts][:] = 0
        found[self.starts][0, self.ctx // 2 :] = self.ctx // 2
        found[self.positions][:] = np.arange(self.ctx)
        angles = np.outer(np.arange(self.ctx), 1e4 ** (-np.arange(self.size // 2) / (self.size // 2)))
        found[self.table][:] = np.stack([np.cos(angles), np.sin(angles)], axis=1 if self.halves else 2)
        return found


# by what they have beside a llama's
BLOCKS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"halves": True, "bias": True},
    "qwen3": {"halves": True, "normed": True},
    "phi3": {"halves": True, "fused": True},
    "gemma2": {"halves": True, "gelu": True, "behind": True, "cap": 50.0, "window": 24},
    "gemma3": {"halves": True, "gelu": True, "normed": True, "behind": True, "window": 24},
}
