"""Hunyuan without experts.

Hugging Face's configuration has an alpha, and the file the base that follows from it.
"""

from typing import Any

from tests.helpers.architecture_family import (
    ATTENTION,
    BEFORE,
    BROAD,
    FORWARD,
    GROUPED,
    OWN,
    Family,
    Numbers,
    Shape,
    key_and_value_length,
    three,
)

ALPHA, BASE = 50.0, 10000.0
ATTENTION_AND_NORMS = [
    *BEFORE,
    *ATTENTION,
    ("attn_q_norm.weight", "self_attn.query_layernorm.weight", "head_size"),
    ("attn_k_norm.weight", "self_attn.key_layernorm.weight", "head_size"),
]


def keys(shape: Shape) -> Numbers:
    """Return the metadata."""
    size = shape.head_size
    return key_and_value_length(shape) | {"rope.freq_base": BASE * ALPHA ** (size / (size - 2))}


def settings(shape: Shape) -> dict[str, Any]:
    """Return the configuration."""
    rope = {"rope_type": "dynamic", "rope_theta": BASE, "alpha": ALPHA, "factor": 1.0}
    return {"rope_parameters": rope}


FAMILY = Family(
    block=[*ATTENTION_AND_NORMS, *FORWARD],
    shapes=three("hunyuan-dense", GROUPED | {"eps": 1e-6}, OWN | {"tied": True}, BROAD),
    config="HunYuanDenseV1Config",
    model="HunYuanDenseV1ForCausalLM",
    keys=keys,
    settings=settings,
    exact_shift=False,  # what is rotated has been multiplied by the weight of a norm
)
