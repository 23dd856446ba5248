"""A new model whose attention and output matrices are products of trained low-rank factors.

baby-llama's LoRA model was built like this. The result is a full model; checkpoints hold that and the
factors.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from llamatrain.graph import ops as O
from llamatrain.graph.tensor import Tensor, parameter
from llamatrain.model import init
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.lora import Weights
from llamatrain.run.trainable import Arrays, Cache, FullModel, TrainableWeights


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

    def make_weights(self, cache: Cache) -> TrainableWeights:
        """Return the graph's weights; low-rank ones are products of two parameters."""
        trained, weights = dict[str, Tensor](), dict[str, Tensor]()
        for name, shape in self.h.shapes.items():
            if name not in low_rank_weights(self.h):
                trained[name] = weights[name] = parameter(name, shape)
                continue
            b = parameter(f"{name}.lora_b", (shape[0], self.rank))
            a = parameter(f"{name}.lora_a", (self.rank, shape[1]))
            trained |= {a.name: a, b.name: b}
            weights[name] = O.matmul_nn(b, a, name=name)
        return TrainableWeights(weights=Weights(weights), trainable=trained)

    def init_weights(self, parts: Arrays) -> None:
        """Initialize both factors randomly.

        Their products have the variance of a new model's matrices.
        """
        low = low_rank_weights(self.h)
        init.init_weights(
            self.h, self.seed, {name: part for name, part in parts.items() if name in self.h.shapes}
        )
        for name in low:
            size = (init.standard_deviation(self.h, name) ** 2 / self.rank) ** 0.25
            for factor in (f"{name}.lora_a", f"{name}.lora_b"):
                generator = np.random.default_rng([self.seed, zlib.crc32(factor.encode())])
                generator.standard_normal(parts[factor].shape, np.float32, out=parts[factor])
                parts[factor] *= np.float32(size)

    def full_weights(self, parts: Arrays) -> dict[str, np.ndarray]:
        """Return all weights of the model, with the factors multiplied."""
        return {
            name: parts[name] if name in parts else parts[f"{name}.lora_b"] @ parts[f"{name}.lora_a"]
            for name in self.h.shapes
        } | dict(self.untrained)

    def checkpoint_tensors(self, parts: Arrays) -> dict[str, np.ndarray]:
        """Return the full weights and the factors."""
        return {**self.full_weights(parts), **parts}

    def result_tensors(self, parts: Arrays) -> dict[str, np.ndarray]:
        """Return the weights of the result file."""
        return self.full_weights(parts)

    def notes(self) -> Iterator[str]:
        """Yield a note about the low-rank matrices."""
        which = "attention" if self.h.tied else "attention and output"
        yield f"the matrices of {which} have rank {self.rank}; {self.result_name} holds them multiplied out"
