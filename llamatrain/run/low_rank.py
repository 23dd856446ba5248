"""A new model whose attention and output matrices are products of trained low-rank factors.

baby-llama's LoRA model was built like this. The result is a full model; checkpoints hold that and the
factors.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from llamatrain.graph import ops as O
from llamatrain.graph.tensor import Tensor, parameter
from llamatrain.model import init
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.run.trainable import Arrays, FullModel


def low_rank_weights(h: Hyperparameters) -> list[str]:
    """Return the names of the weights that are products of factors."""
    kinds = h.weight_kinds()
    return [
        name for name, kind in kinds if kind.role == "output" or (kind.role == "matrix" and ".attn_" in name)
    ]


@dataclass(frozen=True, kw_only=True)
class LowRankModel(FullModel):
    """A full model in which some matrices are products of factors of a given rank."""

    rank: int

    def make_weight(self, name: str, shape: tuple[int, ...]) -> tuple[Sequence[Tensor], Tensor]:
        """Return what is trained of a weight, and the weight in the graph; low-rank ones are products."""
        if name not in low_rank_weights(self.h):
            return super().make_weight(name, shape)
        a = parameter(f"{name}.lora_a", (self.rank, shape[1]))
        b = parameter(f"{name}.lora_b", (shape[0], self.rank))
        return [a, b], O.matmul_nn(b, a, name=name)

    def weight_value(self, name: str, parts: Arrays) -> np.ndarray:
        """Return the value of a weight by what is trained of it."""
        low = f"{name}.lora_a" in parts
        return parts[f"{name}.lora_b"] @ parts[f"{name}.lora_a"] if low else super().weight_value(name, parts)

    def init_weights(self, parts: Arrays) -> None:
        """Initialize both factors randomly.

        Their products have the variance of a new model's matrices.
        """
        low = low_rank_weights(self.h)
        factors = {f"{name}.lora_{half}" for name in low for half in "ab"}
        super().init_weights({name: part for name, part in parts.items() if name not in factors})
        for name in low:
            size = (init.standard_deviation(self.h, name) ** 2 / self.rank) ** 0.25
            for factor in (f"{name}.lora_a", f"{name}.lora_b"):
                generator = np.random.default_rng([self.seed, zlib.crc32(factor.encode())])
                generator.standard_normal(parts[factor].shape, np.float32, out=parts[factor])
                parts[factor] *= np.float32(size)

    def notes(self) -> Iterator[str]:
        """Yield a note about the low-rank matrices."""
        which = "attention" if self.h.tied else "attention and output"
        yield f"the matrices of {which} have rank {self.rank}; {self.result_name} holds them multiplied out"
