"""The text model of Qwen 2 VL.

This version of llama.cpp takes no notice of its epsilon, so all shapes have a tiny one.
"""

from typing import Any

from tests.helpers.architecture_family import (
    ATTENTION,
    BEFORE,
    BIASES,
    FORWARD,
    GROUPED,
    SINGLE,
    VISION_ENDS,
    Family,
    Shape,
    three,
)


def sections(shape: Shape) -> list[int]:
    """Return how many pairs rotate by each axis."""
    pairs = shape.head_size // 2
    return [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3]


def settings(shape: Shape) -> dict[str, Any]:
    """Return the configuration."""
    rope = {"rope_type": "default", "rope_theta": shape.base, "mrope_section": sections(shape)}
    return {"rope_parameters": rope}


FAMILY = Family(
    block=[*BEFORE, *ATTENTION, *BIASES, *FORWARD],
    ends=VISION_ENDS,
    shapes=three(
        "qwen2vl",
        GROUPED | {"base": 1e6, "eps": 1e-9},
        {"heads": 4, "kv_heads": 1, "head_size": 10, "embd": 40, "tied": True, "eps": 1e-9},
        SINGLE | {"eps": 1e-9},
    ),
    config="Qwen2VLConfig",
    model="Qwen2VLForConditionalGeneration",
    keys=lambda shape: {"rope.dimension_sections": [*sections(shape), 0]},  # type: ignore[dict-item]
    settings=settings,
    shifts_context=False,
    vision={"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 1},
)
