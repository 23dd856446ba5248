"""LFM 2 with experts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.helpers.architecture_family import (
    EVEN,
    GROUPED,
    ROUTER,
    SCORE_BIAS,
    ExpertShape,
    Family,
    Numbers,
    Row,
    expert_keys,
    expert_rows,
    expert_settings,
    three,
)
from tests.helpers.architectures import lfm2


@dataclass(frozen=True, kw_only=True)
class MixedShape(ExpertShape, lfm2.ConvolutionShape):
    """The sizes of a model with short convolutions and experts."""

    dense_blocks: int = 1


MIXTURE = [
    *expert_rows("feed_forward.gate", "feed_forward.experts"),
    (SCORE_BIAS, "feed_forward.expert_bias", "experts"),
]


def rows(shape: Any, layer: int) -> Sequence[Row]:
    """Return the weights of a block."""
    forward = lfm2.FORWARD if layer < shape.dense_blocks else MIXTURE
    return [*lfm2.NORMS, *(lfm2.ATTENTION if layer in shape.attending else lfm2.CONVOLUTION), *forward]


def keys(shape: Any) -> Numbers:
    """Return the metadata."""
    counts: Numbers = {"leading_dense_block_count": shape.dense_blocks, "expert_gating_func": 2}
    return lfm2.keys(shape) | expert_keys(shape) | counts


def settings(shape: Any) -> dict[str, Any]:
    """Return the configuration."""
    return lfm2.settings(shape) | expert_settings(shape) | {"num_dense_layers": shape.dense_blocks}


FAMILY = Family(
    block=rows,
    ends=lfm2.FAMILY.ends,
    shapes=three(
        "lfm2moe",
        GROUPED | {"base": 1e6, "layers": 4, "attending": (1, 3), "tied": True, "experts_used": 3},
        {
            "heads": 4,
            "kv_heads": 1,
            "head_size": 10,
            "embd": 40,
            "ff": 64,
            "taps": 4,
            "attending": (0,),
            "layers": 3,
            "experts": 5,
            "dense_blocks": 0,
        },
        EVEN
        | {"eps": 1e-3, "taps": 2, "attending": (2,), "tied": True, "experts": 6, "experts_used": 4}
        | {"dense_blocks": 2},
        MixedShape,
    ),
    config="Lfm2MoeConfig",
    model="Lfm2MoeForCausalLM",
    keys=keys,
    settings=settings,
    without_adapter=("conv.weight", ROUTER),
    wide={"expert_ff": 256},
    constants=(SCORE_BIAS,),
    to_theirs=lfm2.to_theirs,
    gradient_to_ours=lfm2.gradient_to_ours,
    shifts_context=False,
    exact_shift=False,
)
