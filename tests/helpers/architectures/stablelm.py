"""StableLM 3B, StableLM 2 1.6B and StableLM 2 12B, which is the one with both halves of a block side by side."""

from dataclasses import dataclass
from typing import Any

from tests.helpers.architecture_family import (
    ATTENTION,
    BEFORE,
    BIASES,
    FORWARD,
    GROUPED,
    NORMS_OF_EACH_HEAD,
    Family,
    Numbers,
    Row,
    Shape,
    initial_norms_of_each_head,
    layer_norms,
    three,
)


@dataclass(frozen=True, kw_only=True)
class StableLmShape(Shape):
    """Sizes, and whether it is like the 12B model."""

    large: bool = False


NORMS, ENDS = layer_norms(BEFORE)
HEAD_NORMS = [
    (mine, theirs.replace("_norm.weight", "_layernorm.norms.*.weight"), axes)
    for mine, theirs, axes in NORMS_OF_EACH_HEAD
]


def block(shape: StableLmShape, layer: int) -> list[Row]:
    """Return the weights of a block."""
    norms = [row for row in NORMS if not (shape.large and row[0].startswith("ffn_norm"))]
    return [*norms, *ATTENTION, *(HEAD_NORMS if shape.large else BIASES), *FORWARD]


def keys(shape: StableLmShape) -> Numbers:
    """Return the metadata."""
    return {
        "attention.layer_norm_epsilon": shape.eps,
        "rope.dimension_count": shape.turned,
        "use_parallel_residual": shape.large,
    }


def settings(shape: StableLmShape) -> dict[str, Any]:
    """Return the configuration."""
    rope = {
        "rope_type": "default",
        "rope_theta": shape.base,
        "partial_rotary_factor": shape.turned / shape.head_size,
    }
    return {
        "rope_parameters": rope,
        "layer_norm_eps": shape.eps,
        "use_qkv_bias": not shape.large,
        "use_parallel_residual": shape.large,
        "qk_layernorm": shape.large,
    }


SECOND = {"heads": 4, "kv_heads": 1, "head_size": 10, "embd": 40, "turned": 2, "base": 500.0, "eps": 1e-6}
FAMILY = Family(
    block=block,
    ends=ENDS,
    shapes=three(
        "stablelm",
        GROUPED | {"turned": 6},
        SECOND | {"large": True},
        {"heads": 3, "kv_heads": 3, "head_size": 16, "embd": 48, "turned": 4, "layers": 3},
        StableLmShape,
    ),
    config="StableLmConfig",
    model="StableLmForCausalLM",
    without_adapter=tuple(mine for mine, _, _ in NORMS_OF_EACH_HEAD),
    keys=keys,
    dropped_keys=lambda shape: {"attention.layer_norm_rms_epsilon"},
    settings=settings,
    initial=initial_norms_of_each_head,
)
