"""Arcee's foundation models."""

from tests.helpers.architecture_family import (
    ATTENTION,
    BEFORE,
    GROUPED,
    OWN,
    SINGLE,
    UNGATED,
    Family,
    rotary_keys,
    three,
)

FAMILY = Family(
    block=[*BEFORE, *ATTENTION, *UNGATED],
    shapes=three("arcee", GROUPED, OWN | {"tied": True, "base": 500.0}, SINGLE | {"eps": 1e-6}),
    config="ArceeConfig",
    model="ArceeForCausalLM",
    pairs=True,
    keys=rotary_keys,
)
