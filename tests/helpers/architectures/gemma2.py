"""Gemma 2."""

from typing import Any

from tests.helpers.architecture_family import (
    AROUND,
    ATTENTION,
    BROAD,
    FORWARD,
    GROUPED,
    OWN,
    Family,
    Numbers,
    Shape,
    key_and_value_length,
    three,
)


def keys(shape: Shape) -> Numbers:
    """Return the metadata."""
    caps = {"attn_logit_softcapping": shape.score_cap, "final_logit_softcapping": shape.logit_cap}
    return key_and_value_length(shape) | caps | {"attention.sliding_window": shape.window}


def settings(shape: Shape) -> dict[str, Any]:
    """Return the configuration."""
    return {
        "sliding_window": shape.window,
        "query_pre_attn_scalar": shape.head_size,
        "attn_logit_softcapping": shape.score_cap,
        "final_logit_softcapping": shape.logit_cap,
    }


FAMILY = Family(
    block=[*AROUND, *ATTENTION, *FORWARD],
    shapes=three(
        "gemma2",
        GROUPED | {"window": 9, "score_cap": 2.0, "logit_cap": 3.0, "layers": 4, "tied": True},
        OWN | {"window": 5, "score_cap": 0.7, "logit_cap": 1.5, "layers": 3, "eps": 1e-6, "tied": True},
        BROAD | {"window": 16, "score_cap": 50.0, "logit_cap": 30.0, "tied": True},
    ),
    config="Gemma2Config",
    model="Gemma2ForCausalLM",
    norms_less_one=True,
    half_float_gelu=True,
    keys=keys,
    dropped_keys=lambda shape: {"rope.freq_base"},
    settings=settings,
)
