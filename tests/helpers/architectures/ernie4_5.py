"""ERNIE 4.5 without experts."""

from tests.helpers.architecture_family import (
    ATTENTION,
    BEFORE,
    FORWARD,
    GROUPED,
    OWN,
    SINGLE,
    Family,
    key_and_value_length,
    three,
)

FAMILY = Family(
    block=[*BEFORE, *ATTENTION, *FORWARD],
    shapes=three(
        "ernie4_5", GROUPED | {"base": 500000.0}, OWN | {"tied": True}, SINGLE | {"eps": 1e-6, "base": 500.0}
    ),
    config="Ernie4_5Config",
    model="Ernie4_5ForCausalLM",
    keys=key_and_value_length,
)
