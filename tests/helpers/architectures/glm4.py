"""GLM 4."""

from typing import Any

from tests.helpers.architecture_family import (
    ATTENTION,
    BIASES,
    GROUPED,
    Family,
    Numbers,
    Shape,
    key_and_value_length,
    three,
)


def keys(shape: Shape) -> Numbers:
    """Return the metadata."""
    return key_and_value_length(shape) | {"rope.dimension_count": shape.turned}


def settings(shape: Shape) -> dict[str, Any]:
    """Return the configuration."""
    rope = {
        "rope_type": "default",
        "rope_theta": shape.base,
        "partial_rotary_factor": shape.turned / shape.head_size,
    }
    return {"rope_parameters": rope, "attention_bias": True}


FAMILY = Family(
    block=[
        ("attn_norm.weight", "input_layernorm.weight", "embd"),
        ("post_attention_norm.weight", "post_self_attn_layernorm.weight", "embd"),
        ("ffn_norm.weight", "post_attention_layernorm.weight", "embd"),
        ("post_ffw_norm.weight", "post_mlp_layernorm.weight", "embd"),
        *ATTENTION,
        *BIASES,
        ("ffn_up.weight", "mlp.gate_up_proj.weight", "ff2 embd"),
        ("ffn_down.weight", "mlp.down_proj.weight", "embd ff"),
    ],
    shapes=three(
        "glm4",
        GROUPED | {"turned": 6, "eps": 1e-6},
        {"heads": 4, "kv_heads": 1, "head_size": 20, "embd": 36, "turned": 10, "tied": True, "base": 500.0},
        {"heads": 3, "kv_heads": 3, "head_size": 8, "embd": 24, "turned": 4, "layers": 3},
    ),
    config="Glm4Config",
    model="Glm4ForCausalLM",
    keys=keys,
    settings=settings,
)
