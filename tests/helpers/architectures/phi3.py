"""Phi 3 and 4."""

from typing import Any

from tests.helpers.architecture_family import BEFORE, SINGLE, Family, Numbers, Shape, three

LONG, SHORT = (1.0, 1.3, 1.9, 2.6, 3.8, 5.5), (1.0, 1.02, 1.1, 1.2, 1.25, 1.4)


def keys(shape: Shape) -> Numbers:
    """Return the metadata."""
    found: Numbers = {
        "rope.dimension_count": shape.turned or shape.head_size,
        "attention.sliding_window": shape.window,
        "rope.scaling.original_context_length": shape.original_ctx,
    }
    return found | ({"rope.scaling.attn_factor": shape.length} if shape.long else {})


def settings(shape: Shape) -> dict[str, Any]:
    """Return the configuration."""
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": shape.base,
        "partial_rotary_factor": (shape.turned or shape.head_size) / shape.head_size,
    }
    if shape.long:
        rope |= {"rope_type": "longrope", "long_factor": list(shape.long), "short_factor": list(shape.short)}
        rope["original_max_position_embeddings"] = shape.original_ctx
    return {
        "original_max_position_embeddings": shape.original_ctx,
        "sliding_window": None,
        "rope_parameters": rope,
    }


FIRST = {"heads": 3, "kv_heads": 1, "head_size": 16, "embd": 48, "turned": 12, "original_ctx": 24}
THIRD = {"heads": 4, "kv_heads": 2, "head_size": 20, "embd": 80, "turned": 10, "tied": True, "base": 500.0}
FAMILY = Family(
    block=[
        *BEFORE,
        ("attn_qkv.weight", "self_attn.qkv_proj.weight", "qkv embd"),
        ("attn_output.weight", "self_attn.o_proj.weight", "embd width"),
        ("ffn_up.weight", "mlp.gate_up_proj.weight", "ff2 embd"),
        ("ffn_down.weight", "mlp.down_proj.weight", "embd ff"),
    ],
    shapes=three("phi3", FIRST | {"long": LONG, "short": SHORT}, SINGLE | {"eps": 1e-6}, THIRD),
    config="Phi3Config",
    model="Phi3ForCausalLM",
    keys=keys,
    settings=settings,
)
