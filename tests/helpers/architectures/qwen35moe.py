"""Qwen 3.5 with experts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.helpers.architecture_family import (
    BROAD,
    EXPERTS,
    GROUPED,
    OWN,
    ROUTER,
    ExpertShape,
    Numbers,
    Row,
    expert_keys,
    expert_settings,
    join_stacks,
    shared_rows,
    three,
)
from tests.helpers.architectures import qwen35


@dataclass(frozen=True, kw_only=True)
class SharedShape(ExpertShape):
    """The sizes of a model with experts, one of which all tokens use."""

    shared_ff: int = 28


@dataclass(frozen=True, kw_only=True)
class MixedShape(SharedShape, qwen35.HybridShape):
    """The sizes of a model with gated delta nets, too."""


GATE = "ffn_gate_inp_shexp.weight"
SHARED = [
    (GATE, "mlp.shared_expert_gate.weight", "embd"),
    *shared_rows("mlp.shared_expert"),
]


def rows(shape: Any, layer: int) -> Sequence[Row]:
    """Return the weights of a block."""
    mixer = qwen35.DELTA_NET if qwen35.is_recurrent(shape, layer) else qwen35.ATTENTION
    return [*qwen35.NORMS, *mixer, *join_stacks(shape, EXPERTS), *SHARED]


def keys(shape: Any) -> Numbers:
    """Return the metadata."""
    return qwen35.keys(shape) | expert_keys(shape) | {"expert_shared_feed_forward_length": shape.shared_ff}


def settings(shape: Any) -> dict[str, Any]:
    """Return the configuration."""
    shared = {"shared_expert_intermediate_size": shape.shared_ff}
    return qwen35.settings(shape) | expert_settings(shape) | shared


def to_theirs(shape: Any, name: str, array: np.ndarray) -> np.ndarray:
    """Convert a weight."""
    return array[None] if name.endswith(GATE) else qwen35.to_theirs(shape, name, array)


def gradient_to_ours(shape: Any, name: str, array: np.ndarray) -> np.ndarray:
    """Convert a gradient."""
    return array[0] if name.endswith(GATE) else qwen35.gradient_to_ours(shape, name, array)


HEADS = {"key_heads": 3, "value_heads": 3}
FAMILY = replace(
    qwen35.FAMILY,
    block=rows,
    shapes=three(
        "qwen35moe",
        BROAD
        | {"base": 500.0, "eps": 1e-3, "key_size": 16, "value_size": 16, "key_heads": 1, "value_heads": 3}
        | {"taps": 3, "turned": 20, "experts": 9, "experts_used": 4, "expert_ff": 40},
        OWN
        | HEADS
        | {"tied": True, "eps": 5e-2, "layers": 3, "period": 3, "turned": 8, "experts": 7, "experts_used": 6},
        GROUPED
        | {"base": 1e6, "eps": 3e-3, "layers": 4, "turned": 6, "experts_used": 3, "joined_stacks": True},
        MixedShape,
    ),
    config="Qwen3_5MoeTextConfig",
    model="Qwen3_5MoeForCausalLM",
    keys=keys,
    settings=settings,
    without_adapter=("conv1d.weight", ROUTER),
    wide={"expert_ff": 256, "shared_ff": 256},
    to_theirs=to_theirs,
    gradient_to_ours=gradient_to_ours,
    adjust=lambda shape: qwen35.adjust(shape, "qwen3_5_moe"),
)
