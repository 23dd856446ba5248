"""Llama."""

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

FAMILY = Family(
    block=[*BEFORE, *ATTENTION, *FORWARD],
    shapes=three("llama", GROUPED, OWN | {"tied": True, "base": 500.0}, SINGLE),
    config="LlamaConfig",
    model="LlamaForCausalLM",
    pairs=True,
    keys=rotary_keys,
)
