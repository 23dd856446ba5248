"""SmolLM 3: a llama of which every fourth block turns no heads (Bakouch et al. 2025)."""

from llamatrain.model import layers
from llamatrain.model.architecture import Architecture
from llamatrain.model.hyperparameters import Hyperparameters

NO_ROPE_EVERY = 4  # of so many blocks the last


def rope_index(h: Hyperparameters, layer: int) -> int | None:
    return None if layer % NO_ROPE_EVERY == NO_ROPE_EVERY - 1 else 0


ARCHITECTURE = Architecture(
    name="smollm3",
    keys=layers.KEYS,
    weights=layers.WEIGHTS,
    rotation="pairs",
    embed=layers.embed,
    block=layers.block,
    final_norm=layers.final_norm,
    rope_index=rope_index,
    supported_values=layers.SUPPORTED_VALUES,
)
