"""Ministral 3."""

from dataclasses import dataclass
from typing import Any

from tests.helpers.architecture_family import (
    ATTENTION,
    BEFORE,
    FORWARD,
    GROUPED,
    OWN,
    SINGLE,
    Family,
    rotary_keys,
    three,
)
from tests.helpers.architecture_family import Shape as CommonShape


@dataclass(frozen=True, kw_only=True)
class Shape(CommonShape):
    """The sizes, and how long rows are scaled."""

    factor: float = 4.0
    temperature: float = 0.1
    fast: float = 32.0
    slow: float = 1.0


def keys(shape: Shape) -> dict[str, Any]:
    """Return the metadata."""
    return rotary_keys(shape) | {
        "attention.temperature_scale": shape.temperature,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": shape.factor,
        "rope.scaling.original_context_length": shape.original_ctx,
        "rope.scaling.yarn_beta_fast": shape.fast,
        "rope.scaling.yarn_beta_slow": shape.slow,
        "rope.scaling.yarn_log_multiplier": 1.0,
    }


def settings(shape: Shape) -> dict[str, Any]:
    """Return the configuration."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": shape.base,
        "factor": shape.factor,
        "original_max_position_embeddings": shape.original_ctx,
        "max_position_embeddings": shape.ctx,
        "beta_fast": shape.fast,
        "beta_slow": shape.slow,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": shape.temperature,
    }
    return {"rope_parameters": rope}


FAMILY = Family(
    block=[*BEFORE, *ATTENTION, *FORWARD],
    shapes=three(
        "mistral3",
        GROUPED | {"original_ctx": 16, "base": 1e4, "temperature": 0.7},
        OWN | {"original_ctx": 8, "factor": 8.0, "tied": True, "base": 500.0, "fast": 4.0},
        SINGLE | {"original_ctx": 24, "factor": 2.5, "temperature": 0.3, "eps": 1e-6},
        Shape,
    ),
    config="Ministral3Config",
    model="Ministral3ForCausalLM",
    pairs=True,
    keys=keys,
    settings=settings,
)
