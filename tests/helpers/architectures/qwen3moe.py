"""Qwen 3 with mixtures of experts."""

from tests.helpers.architecture_family import (
    ATTENTION,
    BEFORE,
    BROAD,
    EXPERTS,
    GROUPED,
    HEAD_NORMS,
    OWN,
    ROUTER,
    ExpertShape,
    Family,
    expert_keys,
    expert_settings,
    key_and_value_length,
    three,
)

FAMILY = Family(
    block=[*BEFORE, *ATTENTION, *HEAD_NORMS, *EXPERTS],
    shapes=three(
        "qwen3moe",
        GROUPED | {"base": 1e6, "eps": 1e-6, "tied": True, "experts_used": 3},
        OWN | {"experts": 5},
        BROAD | {"base": 500.0, "experts": 9, "experts_used": 4, "expert_ff": 40},
        ExpertShape,
    ),
    config="Qwen3MoeConfig",
    model="Qwen3MoeForCausalLM",
    keys=lambda shape: key_and_value_length(shape) | expert_keys(shape),
    settings=lambda shape: expert_settings(shape) | {"norm_topk_prob": True},
    without_adapter=(ROUTER,),
    wide={"expert_ff": 256},
)
