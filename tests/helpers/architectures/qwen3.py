"""Qwen 3."""

from tests.helpers.architecture_family import (
    ATTENTION,
    BEFORE,
    BROAD,
    FORWARD,
    GROUPED,
    HEAD_NORMS,
    OWN,
    Family,
    key_and_value_length,
    three,
)

FAMILY = Family(
    block=[*BEFORE, *ATTENTION, *HEAD_NORMS, *FORWARD],
    shapes=three(
        "qwen3", GROUPED | {"base": 1e6, "eps": 1e-6}, OWN | {"tied": True}, BROAD | {"base": 500.0}
    ),
    config="Qwen3Config",
    model="Qwen3ForCausalLM",
    keys=key_and_value_length,
)
