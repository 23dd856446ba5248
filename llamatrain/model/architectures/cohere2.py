"""Command R7B and Aya Vision's text models (Cohere 2024): Command R with windows.

Three of four blocks have a window and rotate their heads; the fourth sees all keys and rotates nothing.
"""

from dataclasses import replace

from llamatrain.model import layers
from llamatrain.model.architecture import AttentionMask, Key, WindowPattern, is_windowed
from llamatrain.model.architectures import command_r
from llamatrain.model.hyperparameters import Hyperparameters

KEYS = {
    "attention.sliding_window": Key("window", int, min_value=1),
    "attention.sliding_window_pattern": WindowPattern("period", int, 4),
}


def has_window(h: Hyperparameters, layer: int) -> bool:
    """Return True if a block has a window."""
    return is_windowed(int(h.extra["period"]), layer)


def attention_mask(h: Hyperparameters, layer: int) -> AttentionMask:
    """Return a block's mask."""
    window = int(h.extra["window"]) if has_window(h, layer) else 0
    return AttentionMask(scale=h.head_size**-0.5, window=window)


def rope_index(h: Hyperparameters, layer: int) -> int | None:
    """Return 0, the only rotation, or None for blocks without one."""
    return 0 if has_window(h, layer) else None


WEIGHTS = {name: kind for name, kind in command_r.WEIGHTS.items() if name not in layers.NORMS_OF_EACH_HEAD}
ARCHITECTURE = replace(
    command_r.ARCHITECTURE,
    name="cohere2",
    keys={**command_r.ARCHITECTURE.keys, **KEYS},
    weights=WEIGHTS,
    attention_mask=attention_mask,
    rope_index=rope_index,
    new_model_values={**command_r.ARCHITECTURE.new_model_values, "window": 4096},
    unsupported_names={"cohere2moe": "a mixture of experts"},
)
