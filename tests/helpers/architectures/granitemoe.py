"""Granite 3 with experts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.helpers.architecture_family import (
    ATTENTION,
    BEFORE,
    EVEN,
    GROUPED,
    OWN,
    ROUTER,
    ExpertShape,
    Family,
    Row,
    expert_counts,
    expert_rows,
    expert_settings,
    three,
)
from tests.helpers.architectures import granite


@dataclass(frozen=True, kw_only=True)
class SharedShape(ExpertShape):
    """The sizes of a model with an expert that all tokens use."""

    shared_ff: int = 28


SHARED = [
    ("ffn_gate_shexp.weight", "shared_mlp.input_linear.weight#0", "shared_ff embd"),
    ("ffn_up_shexp.weight", "shared_mlp.input_linear.weight#1", "shared_ff embd"),
    ("ffn_down_shexp.weight", "shared_mlp.output_linear.weight", "embd shared_ff"),
]
MIXTURE = expert_rows("block_sparse_moe.router", "block_sparse_moe.experts", "ff")


def rows(shape: Any, layer: int) -> Sequence[Row]:
    """Return the weights of a block."""
    return [*BEFORE, *ATTENTION, *MIXTURE, *(SHARED if shape.shared_ff else ())]


def keys(shape: Any) -> dict[str, Any]:
    """Return the metadata."""
    shared = {"expert_shared_feed_forward_length": shape.shared_ff} if shape.shared_ff else {}
    return granite.keys(shape) | expert_counts(shape) | shared


def settings(shape: Any) -> dict[str, Any]:
    """Return the configuration."""
    counts = {"num_local_experts": shape.experts, "shared_intermediate_size": shape.shared_ff}
    return granite.settings(shape) | expert_settings(shape) | counts


FAMILY = Family(
    block=rows,
    shapes=three(
        "granitemoe",
        GROUPED | granite.FIRST | {"ff": 24, "experts_used": 3},
        OWN | granite.SECOND | {"tied": True, "ff": 32, "experts": 5, "shared_ff": 0},
        EVEN | granite.THIRD | {"ff": 20, "experts": 6, "experts_used": 4, "shared_ff": 40},
        SharedShape,
    ),
    config="GraniteMoeSharedConfig",
    model="GraniteMoeSharedForCausalLM",
    pairs=True,
    keys=keys,
    settings=settings,
    without_adapter=(ROUTER,),
    not_in_peft=("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),  # one module
)
