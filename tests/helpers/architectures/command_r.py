"""Command R and Aya."""

from typing import Any

from tests.helpers.architecture_family import ATTENTION, FORWARD, GROUPED, SINGLE, Family, Shape, three


def keys(shape: Shape) -> dict[str, Any]:
    """Return the metadata."""
    return {
        "attention.layer_norm_epsilon": shape.eps,
        "logit_scale": shape.logit_scale,
        "rope.scaling.type": "none",
    }


def settings(shape: Shape) -> dict[str, Any]:
    """Return the configuration."""
    return {"layer_norm_eps": shape.eps, "logit_scale": shape.logit_scale}


FAMILY = Family(
    block=[("attn_norm.weight", "input_layernorm.weight", "embd"), *ATTENTION, *FORWARD],
    shapes=three(
        "command-r",
        GROUPED | {"base": 8e6, "logit_scale": 0.6, "tied": True},
        {
            "heads": 4,
            "kv_heads": 1,
            "head_size": 10,
            "embd": 40,
            "tied": True,
            "eps": 1e-6,
            "logit_scale": 1.5,
        },
        SINGLE | {"base": 500.0, "logit_scale": 0.9, "tied": True},
    ),
    config="CohereConfig",
    model="CohereForCausalLM",
    keys=keys,
    dropped_keys=lambda shape: {"attention.layer_norm_rms_epsilon"},
    settings=settings,
)
