"""Qwen 2."""

from tests.helpers.architecture_family import (
    ATTENTION,
    BEFORE,
    BIASES,
    FORWARD,
    GROUPED,
    SINGLE,
    Family,
    three,
)

FAMILY = Family(
    block=[*BEFORE, *ATTENTION, *BIASES, *FORWARD],
    shapes=three(
        "qwen2",
        GROUPED | {"base": 1e6, "eps": 1e-6},
        {"heads": 4, "kv_heads": 1, "head_size": 10, "embd": 40, "tied": True},
        SINGLE | {"eps": 1e-2},
    ),
    config="Qwen2Config",
    model="Qwen2ForCausalLM",
)
