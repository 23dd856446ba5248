"""A new model of low rank: attention and output are products of factors, and those are trained, with all else that it has.

As baby-llama's model of that kind. What comes of it is a whole model; its checkpoints have that, and the factors beside.
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
    kinds = h.weight_kinds()
    return [
        name for name, kind in kinds if kind.role == "output" or (kind.role == "matrix" and ".attn_" in name)
    ]


@dataclass(frozen=True, kw_only=True)
class LowRankModel(FullModel):
    rank: int

    def make_weights(self, cache: Cache) -> TrainableWeights:
        trained, weights = dict[str, Tensor](), dict[str, Tensor]()
        for name, shape in self.h.shapes.items():
            if name not in low_rank_weights(self.h):
                trained[name] = weights[name] = parameter(name, shape)
                continue
            b, a = (
                parameter(f"{name}.lora_b", (shape[0], self.rank)),
                parameter(f"{name}.lora_a", (self.rank, shape[1])),
            )
            trained |= {a.name: a, b.name: b}
            weights[name] = O.matmul_nn(b, a, name=name)
        return TrainableWeights(weights=Weights(weights), trainable=trained)

    def init_weights(self, parts: Arrays) -> None:
        """Both factors are random; their products are as large as the matrices of any new model."""
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
        return {
            name: parts[name] if name in parts else parts[f"{name}.lora_b"] @ parts[f"{name}.lora_a"]
            for name in self.h.shapes
        } | dict(self.untrained)

    def checkpoint_tensors(self, parts: Arrays) -> dict[str, np.ndarray]:
        return {**self.full_weights(parts), **parts}

    def result_tensors(self, parts: Arrays) -> dict[str, np.ndarray]:
        return self.full_weights(parts)

    def notes(self) -> Iterator[str]:
        which = "attention" if self.h.tied else "attention and output"
        yield f"the matrices of {which} are products of factors of rank {self.rank}, in {self.result_name} as any others"
