"""SmolLM 3: a llama of which every fourth block turns no heads (Bakouch et al. 2025)."""

from llamatrain.model import usual
from llamatrain.model.architecture import Architecture
from llamatrain.model.hyperparameters import Hyperparameters

STILL = 4  # of so many blocks the last


def turned(h: Hyperparameters, layer: int) -> int | None:
    return None if layer % STILL == STILL - 1 else 0


ARCHITECTURE = Architecture(
    name="smollm3",
    keys=usual.KEYS,
    weights=usual.WEIGHTS,
    rotation="pairs",
    embed=usual.embed,
    block=usual.block,
    last=usual.last,
    turned=turned,
    refused=usual.REFUSED,
)
