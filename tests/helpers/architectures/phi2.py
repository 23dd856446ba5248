"""Phi 1, 1.5 and 2. Its converter writes as many key/value heads as heads, and no base."""

from typing import Any

from tests.helpers.architecture_family import (
    ATTENTION,
    BIASES,
    ENDS,
    Family,
    Numbers,
    Shape,
    layer_norms,
    three,
)

DENSE = ("attn_output.weight", "self_attn.dense.weight", "embd width")
NORMS, _ = layer_norms([("attn_norm.weight", "input_layernorm.weight", "embd")])


def keys(shape: Shape) -> Numbers:
    """Return the metadata."""
    return {"attention.layer_norm_epsilon": shape.eps, "rope.dimension_count": shape.turned}


def settings(shape: Shape) -> dict[str, Any]:
    """Return the configuration."""
    rope = {
        "rope_type": "default",
        "rope_theta": shape.base,
        "partial_rotary_factor": shape.turned / shape.head_size,
    }
    return {"rope_parameters": rope, "layer_norm_eps": shape.eps}


FAMILY = Family(
    block=[
        *NORMS,
        *ATTENTION[:3],
        *BIASES,
        DENSE,
        ("attn_output.bias", "self_attn.dense.bias", "embd"),
        ("ffn_up.weight", "mlp.fc1.weight", "ff embd"),
        ("ffn_up.bias", "mlp.fc1.bias", "ff"),
        ("ffn_down.weight", "mlp.fc2.weight", "embd ff"),
        ("ffn_down.bias", "mlp.fc2.bias", "embd"),
    ],
    ends=[
        ENDS[0],
        ("output_norm.weight", "model.final_layernorm.weight", "embd"),
        ("output_norm.bias", "model.final_layernorm.bias", "embd"),
        ENDS[2],
        ("output.bias", "lm_head.bias", "vocab"),
    ],
    shapes=three(
        "phi2",
        {"heads": 4, "kv_heads": 4, "head_size": 12, "embd": 48, "ff": 192, "turned": 6},
        {
            "heads": 5,
            "kv_heads": 5,
            "head_size": 8,
            "embd": 40,
            "ff": 160,
            "turned": 2,
            "eps": 1e-6,
            "layers": 3,
        },
        {"heads": 2, "kv_heads": 2, "head_size": 80, "embd": 160, "ff": 640, "turned": 32},
    ),
    config="PhiConfig",
    model="PhiForCausalLM",
    half_float_gelu=True,
    keys=keys,
    dropped_keys=lambda shape: {"attention.layer_norm_rms_epsilon", "rope.freq_base"},
    settings=settings,
)
