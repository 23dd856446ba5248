"""SmolLM 3."""

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
    shapes=three(
        "smollm3",
        GROUPED | {"layers": 5, "base": 2e6, "eps": 1e-6},
        OWN | {"layers": 4, "tied": True},
        SINGLE | {"layers": 8},
    ),
    config="SmolLM3Config",
    model="SmolLM3ForCausalLM",
    pairs=True,
    keys=rotary_keys,
    shifts_context=False,
    wide={"layers": 4},
)
