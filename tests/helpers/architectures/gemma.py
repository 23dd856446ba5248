"""Gemma 1."""

from tests.helpers.architecture_family import (
    ATTENTION,
    BEFORE,
    BROAD,
    FORWARD,
    GROUPED,
    OWN,
    Family,
    key_and_value_length,
    three,
)

FAMILY = Family(
    block=[*BEFORE, *ATTENTION, *FORWARD],
    shapes=three(
        "gemma",
        GROUPED | {"layers": 3, "tied": True},
        OWN | {"eps": 1e-6, "tied": True},
        BROAD | {"tied": True},
    ),
    config="GemmaConfig",
    model="GemmaForCausalLM",
    norms_less_one=True,
    half_float_gelu=True,
    keys=key_and_value_length,
    dropped_keys=lambda shape: {"rope.freq_base"},
)
