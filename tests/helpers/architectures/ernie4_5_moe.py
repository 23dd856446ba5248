"""ERNIE 4.5 with experts."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.helpers.architecture_family import (
    ATTENTION,
    BEFORE,
    EVEN,
    EXPERTS,
    FORWARD,
    GROUPED,
    OWN,
    ROUTER,
    SCORE_BIAS,
    DenseAndSharedShape,
    Family,
    Numbers,
    Row,
    expert_keys,
    key_and_value_length,
    shared_rows,
    three,
)

BIAS = (SCORE_BIAS, "mlp.gate.moe_statics.e_score_correction_bias", "experts")


def rows(shape: Any, layer: int) -> Sequence[Row]:
    """Return the weights of a block."""
    shared = shared_rows("mlp.shared_experts") if shape.shared else []
    forward = FORWARD if layer < shape.dense_blocks else [*EXPERTS, BIAS, *shared]
    return [*BEFORE, *ATTENTION, *forward]


def keys(shape: Any) -> Numbers:
    """Return the metadata."""
    more = {"leading_dense_block_count": shape.dense_blocks, "interleave_moe_layer_step": 1}
    shared = {"expert_shared_count": shape.shared, "expert_shared_feed_forward_length": shape.shared_ff}
    return key_and_value_length(shape) | expert_keys(shape) | more | (shared if shape.shared else {})


def settings(shape: Any) -> dict[str, Any]:
    """Return the configuration."""
    return {
        "moe_num_experts": shape.experts,
        "moe_k": shape.experts_used,
        "moe_intermediate_size": shape.expert_ff,
        "moe_num_shared_experts": shape.shared,
        "moe_layer_start_index": shape.dense_blocks,
    }


def to_theirs(shape: Any, name: str, array: np.ndarray) -> np.ndarray:
    """Convert a weight."""
    return array[None] if name.endswith(SCORE_BIAS) else array


FAMILY = Family(
    block=rows,
    shapes=three(
        "ernie4_5-moe",
        GROUPED | {"base": 500000.0, "tied": True, "layers": 3, "experts_used": 3, "shared": 2},
        OWN | {"experts": 5, "expert_ff": 32, "dense_blocks": 0, "shared": 1},
        EVEN
        | {"eps": 1e-3, "base": 500.0, "experts": 9, "experts_used": 4, "expert_ff": 40}
        | {"dense_blocks": 2, "shared": 0},
        DenseAndSharedShape,
    ),
    config="Ernie4_5_MoeConfig",
    model="Ernie4_5_MoeForCausalLM",
    keys=keys,
    settings=settings,
    without_adapter=(ROUTER,),
    adapts_by_weight=True,
    wide={"expert_ff": 256},
    constants=(SCORE_BIAS,),
    to_theirs=to_theirs,
)
