"""Seed-OSS."""

from tests.helpers.architecture_family import (
    ATTENTION,
    BEFORE,
    BIASES,
    BROAD,
    FORWARD,
    GROUPED,
    OWN,
    Family,
    key_and_value_length,
    three,
)

FAMILY = Family(
    block=[
        BEFORE[0],
        ("post_attention_norm.weight", "post_attention_layernorm.weight", "embd"),
        *ATTENTION,
        *BIASES,
        *FORWARD,
    ],
    shapes=three(
        "seed_oss",
        GROUPED | {"base": 1e7, "eps": 1e-6},
        OWN | {"tied": True},
        BROAD | {"base": 500.0},
    ),
    config="SeedOssConfig",
    model="SeedOssForCausalLM",
    keys=key_and_value_length,
    settings=lambda shape: {"attention_bias": True, "attention_out_bias": False},
)
