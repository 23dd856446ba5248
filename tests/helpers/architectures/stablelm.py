"""StableLM 3B and StableLM 2 1.6B."""

from typing import Any

from tests.helpers.architecture_family import (
    ATTENTION,
    BEFORE,
    BIASES,
    FORWARD,
    GROUPED,
    Family,
    Numbers,
    Shape,
    layer_norms,
    three,
)


def keys(shape: Shape) -> Numbers:
    """Return the metadata."""
    return {
        "attention.layer_norm_epsilon": shape.eps,
        "rope.dimension_count": shape.turned,
        "use_parallel_residual": False,
    }


def settings(shape: Shape) -> dict[str, Any]:
    """Return the configuration."""
    rope = {
        "rope_type": "default",
        "rope_theta": shape.base,
        "partial_rotary_factor": shape.turned / shape.head_size,
    }
    return {"rope_parameters": rope, "layer_norm_eps": shape.eps, "use_qkv_bias": True}


BLOCK, ENDS = layer_norms(BEFORE)
FAMILY = Family(
    block=[*BLOCK, *ATTENTION, *BIASES, *FORWARD],
    ends=ENDS,
    shapes=three(
        "stablelm",
        GROUPED | {"turned": 6},
        {"heads": 4, "kv_heads": 1, "head_size": 10, "embd": 40, "turned": 2, "base": 500.0, "eps": 1e-6},
        {"heads": 3, "kv_heads": 3, "head_size": 16, "embd": 48, "turned": 4, "layers": 3},
    ),
    config="StableLmConfig",
    model="StableLmForCausalLM",
    keys=keys,
    dropped_keys=lambda shape: {"attention.layer_norm_rms_epsilon"},
    settings=settings,
)
