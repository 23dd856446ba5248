"""OLMoE."""

from tests.helpers.architecture_family import (
    ATTENTION,
    BEFORE,
    EVEN,
    ROUTER,
    ExpertShape,
    Family,
    expert_counts,
    expert_rows,
    expert_settings,
    three,
)
from tests.helpers.architectures.olmo2 import NORMS

FAMILY = Family(
    block=[*BEFORE, *ATTENTION, *NORMS, *expert_rows(inner="ff")],
    shapes=three(
        "olmoe",
        {"heads": 4, "kv_heads": 4, "base": 500000.0, "ff": 24, "experts_used": 3},
        {"heads": 4, "kv_heads": 4, "head_size": 10, "embd": 40, "ff": 32, "experts": 5},
        EVEN | {"eps": 1e-2, "ff": 20, "experts": 9, "experts_used": 4},
        ExpertShape,
    ),
    config="OlmoeConfig",
    model="OlmoeForCausalLM",
    keys=expert_counts,
    settings=expert_settings,
    without_adapter=(ROUTER,),
    wide={"heads": 4, "kv_heads": 4, "head_size": 64},
    groups_heads=False,
)
