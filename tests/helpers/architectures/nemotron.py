"""Nemotron 4 and Minitron."""

from typing import Any

from tests.helpers.architecture_family import (
    ATTENTION,
    BEFORE,
    GROUPED,
    UNGATED,
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
        "vocab_size": shape.vocab,
        "rope.dimension_count": shape.turned,
        "rope.scaling.type": "none",  # type: ignore[dict-item]
    }


def settings(shape: Shape) -> dict[str, Any]:
    """Return the configuration."""
    rope = {
        "rope_type": "default",
        "rope_theta": shape.base,
        "partial_rotary_factor": shape.turned / shape.head_size,
    }
    return {"rope_parameters": rope, "norm_eps": shape.eps}


BLOCK, ENDS = layer_norms(BEFORE)
FAMILY = Family(
    block=[*BLOCK, *ATTENTION, *UNGATED],
    ends=ENDS,
    shapes=three(
        "nemotron",
        GROUPED | {"turned": 6},
        {"heads": 4, "kv_heads": 1, "head_size": 20, "embd": 80, "turned": 10, "base": 500.0, "eps": 1e-6},
        {"heads": 3, "kv_heads": 3, "head_size": 8, "embd": 24, "turned": 4, "layers": 3},
    ),
    config="NemotronConfig",
    model="NemotronForCausalLM",
    norms_less_one=True,
    keys=keys,
    dropped_keys=lambda shape: {"attention.layer_norm_rms_epsilon"},
    settings=settings,
    fills_width=True,
)
