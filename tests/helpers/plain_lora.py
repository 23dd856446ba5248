"""Low-rank adapters in plain torch: y = W x + s · B (A x), in float64 as well (W + s B A) x. Only A and B are trained."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from tests.helpers.plain_llama import Numbers, Row, Weights, loss

torch.set_num_threads(1)  # such small sums are slower with more, and far slower where other programs run, too

EMBEDDINGS = "token_embd.weight"
Pairs = Mapping[str, tuple[np.ndarray, np.ndarray]]


class Lora:
    def __init__(self, base: Mapping[str, np.ndarray], pairs: Pairs, scales: Mapping[str, float]) -> None:
        self.base = {name: torch.tensor(array, dtype=torch.float64) for name, array in base.items()}
        self.a, self.b = ({name: of_float64(pair[i]) for name, pair in pairs.items()} for i in range(2))
        self.scales = scales

    def delta(self, name: str) -> Tensor:
        """Of the embeddings' pair, a token's row of A is taken, so that A stands on the left."""
        a, b = self.a[name], self.b[name]
        return self.scales[name] * (a @ b.T if name == EMBEDDINGS else b @ a)

    def weights(self) -> Weights:
        return {name: w + self.delta(name) if name in self.a else w for name, w in self.base.items()}

    def loss(self, n: Numbers, rows: Sequence[Row]) -> Tensor:
        return loss(self.weights(), n, rows)


def of_float64(array: np.ndarray) -> Tensor:
    return torch.tensor(array, dtype=torch.float64, requires_grad=True)


class Trainer:
    """AdamW as it was published; B may learn faster than A by some ratio (LoRA+)."""

    def __init__(self, lora: Lora, clip: float = 1.0, decay: float = 0.1, ratio: float = 1.0) -> None:
        self.lora, self.clip, self.ratio = lora, clip, ratio
        groups = [{"params": list(lora.a.values())}, {"params": list(lora.b.values())}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8, weight_decay=decay)

    def step(self, n: Numbers, rows: Sequence[Row], rate: float) -> tuple[float, float]:
        """The loss and the gradient's norm before the update."""
        self.optimizer.zero_grad()
        value = self.lora.loss(n, rows)
        value.backward()
        grads = [p.grad for p in (*self.lora.a.values(), *self.lora.b.values()) if p.grad is not None]
        norm = float(torch.stack([g.square().sum() for g in grads]).sum().sqrt())
        if self.clip and norm > self.clip:
            for g in grads:
                g *= self.clip / norm
        for group, by in zip(self.optimizer.param_groups, (1.0, self.ratio), strict=True):
            group["lr"] = by * rate
        self.optimizer.step()
        return float(value.detach()), norm
