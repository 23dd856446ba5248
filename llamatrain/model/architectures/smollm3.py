"""SmolLM 3: a llama of which every fourth block turns no heads (Bakouch et al. 2025)."""

from llamatrain.model import layers
from llamatrain.model.architecture import Architecture
from llamatrain.model.hyperparameters import Hyperparameters

STILL = 4  # of so many blocks the last


def turned(h: Hyperparameters, layer: int) -> int | None:
    return None if layer % STILL == STILL - 1 else 0


ARCHITECTURE = Architecture(
    name="smollm3",
    keys=layers.KEYS,
    weights=layers.WEIGHTS,
    rotation="pairs",
    embed=layers.embed,
    block=layers.block,
    last=layers.last,
    turned=turned,
    refused=layers.REFUSED,
)
