"""EXAONE 4: the 1.2B model, which has no windows."""

from tests.helpers.architecture_family import (
    ATTENTION,
    BEHIND,
    FORWARD,
    GROUPED,
    HEAD_NORMS,
    SINGLE,
    Family,
    key_and_value_length,
    three,
)

FAMILY = Family(
    block=[*BEHIND, *ATTENTION, *HEAD_NORMS, *FORWARD],
    shapes=three(
        "exaone4",
        GROUPED | {"base": 1e6, "eps": 1e-6},
        {"heads": 4, "kv_heads": 1, "head_size": 10, "embd": 40, "tied": True},
        SINGLE | {"base": 500.0},
    ),
    config="Exaone4Config",
    model="Exaone4ForCausalLM",
    keys=key_and_value_length,
    settings=lambda shape: {
        "sliding_window": None,
        "layer_types": ["full_attention"] * shape.layers,
    },
)
