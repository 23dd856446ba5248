"""Gemma 3."""

from typing import Any

from tests.helpers.architecture_family import (
    AROUND,
    ATTENTION,
    BROAD,
    FORWARD,
    GROUPED,
    HEAD_NORMS,
    OWN,
    Family,
    Numbers,
    Shape,
    key_and_value_length,
    three,
)


def keys(shape: Shape) -> Numbers:
    """Return the metadata."""
    return key_and_value_length(shape) | {"attention.sliding_window": shape.window}


def settings(shape: Shape) -> dict[str, Any]:
    """Return the configuration."""
    whole, local = ({"rope_type": "default", "rope_theta": base} for base in (shape.base, 10000.0))
    return {
        "sliding_window": shape.window,
        "query_pre_attn_scalar": shape.head_size,
        "rope_parameters": {"full_attention": whole, "sliding_attention": local},
    }


FAMILY = Family(
    block=[*AROUND, *ATTENTION, *HEAD_NORMS, *FORWARD],
    shapes=three(
        "gemma3",
        GROUPED | {"window": 9, "base": 1e6, "layers": 7, "tied": True, "eps": 1e-6},
        OWN | {"window": 5, "base": 500.0, "layers": 6, "tied": True},
        BROAD | {"window": 16, "base": 1e6, "tied": True},
    ),
    config="Gemma3TextConfig",
    model="Gemma3ForCausalLM",
    norms_less_one=True,
    half_float_gelu=True,
    keys=keys,
    settings=settings,
)
