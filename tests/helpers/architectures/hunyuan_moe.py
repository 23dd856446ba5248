"""Hunyuan with experts."""

from dataclasses import dataclass, replace
from typing import Any

from tests.helpers.architecture_family import (
    EVEN,
    GROUPED,
    OWN,
    ROUTER,
    ExpertShape,
    Numbers,
    expert_counts,
    expert_rows,
    expert_settings,
    shared_rows,
    three,
)
from tests.helpers.architectures import hunyuan_dense


@dataclass(frozen=True, kw_only=True)
class MixedShape(ExpertShape):
    """The sizes of a model whose experts are as wide as the one that all tokens use."""

    @property
    def shared_ff(self) -> int:
        """The width of the expert that all tokens use."""
        return self.ff


def keys(shape: Any) -> Numbers:
    """Return the metadata."""
    widths = {"expert_feed_forward_length": shape.ff, "expert_shared_feed_forward_length": shape.ff}
    return hunyuan_dense.keys(shape) | expert_counts(shape) | {"expert_shared_count": 1} | widths


def settings(shape: Any) -> dict[str, Any]:
    """Return the configuration."""
    return hunyuan_dense.settings(shape) | expert_settings(shape)


FAMILY = replace(
    hunyuan_dense.FAMILY,
    block=[
        *hunyuan_dense.ATTENTION_AND_NORMS,
        *expert_rows("mlp.gate.wg", inner="ff"),
        *shared_rows("mlp.shared_mlp"),
    ],
    shapes=three(
        "hunyuan-moe",
        GROUPED | {"eps": 1e-6, "ff": 24, "experts_used": 3},
        OWN | {"tied": True, "ff": 32, "experts": 5, "experts_used": 3},
        EVEN | {"eps": 1e-3, "ff": 40, "experts": 9, "experts_used": 4},
        MixedShape,
    ),
    config="HunYuanMoEV1Config",
    model="HunYuanMoEV1ForCausalLM",
    keys=keys,
    settings=settings,
    without_adapter=(ROUTER,),
    adapts_by_weight=True,
)
