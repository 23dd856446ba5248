"""Command R7B."""

from typing import Any

from tests.helpers.architecture_family import ATTENTION, FORWARD, GROUPED, SINGLE, Family, Shape, three
from tests.helpers.architectures import command_r


def keys(shape: Shape) -> dict[str, Any]:
    """Return the metadata."""
    return command_r.keys(shape) | {
        "attention.sliding_window": shape.window,
        "vocab_size": shape.vocab,
        "rope.dimension_count": shape.head_size,
    }


def settings(shape: Shape) -> dict[str, Any]:
    """Return the configuration."""
    kinds = ["full_attention" if layer % 4 == 3 else "sliding_attention" for layer in range(shape.layers)]
    return command_r.settings(shape) | {"sliding_window": shape.window, "layer_types": kinds}


FAMILY = Family(
    block=[("attn_norm.weight", "input_layernorm.weight", "embd"), *ATTENTION, *FORWARD],
    shapes=three(
        "cohere2",
        GROUPED | {"base": 5e4, "logit_scale": 0.6, "tied": True, "window": 9, "layers": 5},
        {
            "heads": 4,
            "kv_heads": 1,
            "head_size": 10,
            "embd": 40,
            "tied": True,
            "eps": 1e-6,
            "logit_scale": 1.5,
            "window": 16,
            "layers": 4,
        },
        SINGLE | {"base": 500.0, "logit_scale": 0.9, "tied": True, "window": 5, "layers": 4},
    ),
    config="Cohere2Config",
    model="Cohere2ForCausalLM",
    keys=keys,
    dropped_keys=lambda shape: {"attention.layer_norm_rms_epsilon"},
    settings=settings,
    shifts_context=False,  # llama.cpp turns keys of blocks that never turn
)
