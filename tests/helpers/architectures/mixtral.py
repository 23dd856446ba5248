"""Mixtral, which files name a llama."""

from dataclasses import dataclass

from tests.helpers.architecture_family import (
    ATTENTION,
    BEFORE,
    EVEN,
    GROUPED,
    OWN,
    ROUTER,
    ExpertShape,
    Family,
    expert_counts,
    expert_rows,
    expert_settings,
    rotary_keys,
    three,
)


@dataclass(frozen=True, kw_only=True)
class MixtralShape(ExpertShape):
    """The sizes of a llama with experts."""

    @property
    def file_arch(self) -> str:
        return "llama"


FAMILY = Family(
    block=[*BEFORE, *ATTENTION, *expert_rows(inner="ff")],
    shapes=three(
        "mixtral",
        GROUPED | {"base": 1e6, "ff": 24, "experts_used": 3},
        OWN | {"tied": True, "ff": 32, "experts": 5, "experts_used": 3},
        EVEN | {"eps": 1e-2, "ff": 20, "experts": 9, "experts_used": 4},
        MixtralShape,
    ),
    config="MixtralConfig",
    model="MixtralForCausalLM",
    pairs=True,
    keys=lambda shape: rotary_keys(shape) | expert_counts(shape),
    settings=lambda shape: {**expert_settings(shape), "num_local_experts": shape.experts},
    without_adapter=(ROUTER,),
)
