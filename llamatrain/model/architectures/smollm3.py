"""SmolLM 3 (Bakouch et al. 2025): a llama in which every fourth block has no rotation."""

from llamatrain.model import layers
from llamatrain.model.architecture import Architecture
from llamatrain.model.hyperparameters import Hyperparameters

NO_ROPE_EVERY = 4  # each fourth block has no rotation


def rope_index(h: Hyperparameters, layer: int) -> int | None:
    """Return 0, the only rotation, or None for blocks without one."""
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
