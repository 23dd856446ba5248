"""Initial weights of a new model, from a seed.

    norms, constants          1
    biases                    0
    matrices, embeddings      normal, deviation 1/sqrt(in): a product keeps the size of its input
    residual matrices         1/sqrt(2 · layers) of that: the sum over all blocks keeps it, too (Radford et al. 2019)

The first loss is about ln(vocabulary) + 1/2. With AdamW, flatter first logits (0.25 of the deviation) and smaller
embeddings (0.02) began lower and learned slower: 2.16 against 2.09 after 300 steps of a byte model. With AdaMuon,
smaller embeddings learn faster, which is why their deviation is an option.

Each tensor has its own generator, seeded by the seed and the tensor's name, so that adding or removing a
tensor changes no other.
"""

import math
import zlib

import numpy as np

from llamatrain.model.hyperparameters import Hyperparameters


def standard_deviation(h: Hyperparameters, name: str, embd_std: float | None = None) -> float:
    """Return the standard deviation of a weight's initial values; `embd_std` is that of embeddings."""
    kind = h.weight_kind(name)
    if kind.role == "embedding" and embd_std is not None:
        return embd_std
    return (1.0 / math.sqrt(2 * h.layers) if kind.residual else 1.0) / math.sqrt(
        kind.shape(h.for_weight(name))[-1]
    )


def init_weights(
    h: Hyperparameters, seed: int, weights: dict[str, np.ndarray], embd_std: float | None = None
) -> None:
    """Fill the arrays with the initial values."""
    for name, array in weights.items():
        kind = h.weight_kind(name)
        generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
        if kind.initial:
            array[...] = kind.initial(generator, array.shape)
            continue
        if kind.role in ("norm", "bias", "constant"):
            array[...] = kind.role != "bias"
            continue
        generator.standard_normal(array.shape, np.float32, out=array)
        array *= np.float32(standard_deviation(h, name, embd_std))
