"""The text model of Qwen 3 VL."""

from typing import Any

from tests.helpers.architecture_family import (
    ATTENTION,
    BEFORE,
    BROAD,
    FORWARD,
    GROUPED,
    HEAD_NORMS,
    OWN,
    VISION_ENDS,
    Family,
    Shape,
    key_and_value_length,
    three,
)
from tests.helpers.architectures.qwen2vl import sections, settings


def keys(shape: Shape) -> dict[str, Any]:
    """Return the metadata."""
    return key_and_value_length(shape) | {
        "rope.dimension_sections": [*sections(shape), 0],
        "n_deepstack_layers": 1,
    }


FAMILY = Family(
    block=[*BEFORE, *ATTENTION, *HEAD_NORMS, *FORWARD],
    ends=VISION_ENDS,
    shapes=three(
        "qwen3vl", GROUPED | {"base": 1e6, "eps": 1e-6}, OWN | {"tied": True}, BROAD | {"base": 500.0}
    ),
    config="Qwen3VLConfig",
    model="Qwen3VLForConditionalGeneration",
    keys=keys,
    settings=settings,
    shifts_context=False,
    vision={
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 16,
        "deepstack_visual_indexes": [0],
    },
)
