"""Qwen 1.5 and 2 with mixtures of experts."""

from typing import Any

import numpy as np

from tests.helpers.architecture_family import (
    ATTENTION,
    BEFORE,
    BIASES,
    EVEN,
    EXPERTS,
    GROUPED,
    ROUTER,
    Family,
    Numbers,
    Shape,
    expert_keys,
    expert_settings,
    three,
)
from tests.helpers.architectures.qwen35moe import GATE, SHARED, SharedShape


def keys(shape: Any) -> Numbers:
    """Return the metadata."""
    return expert_keys(shape) | {"expert_shared_feed_forward_length": shape.shared_ff}


def settings(shape: Any) -> dict[str, Any]:
    """Return the configuration."""
    return expert_settings(shape) | {"shared_expert_intermediate_size": shape.shared_ff}


def to_theirs(shape: Shape, name: str, array: np.ndarray) -> np.ndarray:
    """Convert a weight."""
    return array[None] if name.endswith(GATE) else array


def gradient_to_ours(shape: Shape, name: str, array: np.ndarray) -> np.ndarray:
    """Convert a gradient."""
    return array[0] if name.endswith(GATE) else array


FAMILY = Family(
    block=[*BEFORE, *ATTENTION, *BIASES, *EXPERTS, *SHARED],
    shapes=three(
        "qwen2moe",
        GROUPED | {"base": 1e6, "eps": 1e-6, "experts_used": 3},
        {"heads": 4, "kv_heads": 1, "head_size": 10, "embd": 40, "ff": 64, "experts": 5, "experts_used": 3},
        EVEN | {"eps": 1e-2, "experts": 6, "experts_used": 4, "expert_ff": 40},
        SharedShape,
    ),
    config="Qwen2MoeConfig",
    model="Qwen2MoeForCausalLM",
    keys=keys,
    settings=settings,
    without_adapter=(ROUTER,),
    wide={"expert_ff": 256, "shared_ff": 256},
    to_theirs=to_theirs,
    gradient_to_ours=gradient_to_ours,
)
