"""Command R and Aya, and Command R+, which norms each head of queries and keys."""

from dataclasses import dataclass, replace
from typing import Any

from tests.helpers.architecture_family import (
    ATTENTION,
    FORWARD,
    GROUPED,
    NORMS_OF_EACH_HEAD,
    SINGLE,
    Family,
    Row,
    Shape,
    initial_norms_of_each_head,
    three,
)


@dataclass(frozen=True, kw_only=True)
class CommandRShape(Shape):
    """Sizes, and whether it is like Command R+."""

    large: bool = False


def block(shape: CommandRShape, layer: int) -> list[Row]:
    """Return the weights of a block."""
    return [
        ("attn_norm.weight", "input_layernorm.weight", "embd"),
        *ATTENTION,
        *(NORMS_OF_EACH_HEAD if shape.large else ()),
        *FORWARD,
    ]


def keys(shape: Shape) -> dict[str, Any]:
    """Return the metadata."""
    return {
        "attention.layer_norm_epsilon": shape.eps,
        "logit_scale": shape.logit_scale,
        "rope.scaling.type": "none",
    }


def settings(shape: Shape) -> dict[str, Any]:
    """Return the configuration."""
    return {"layer_norm_eps": shape.eps, "logit_scale": shape.logit_scale}


FAMILY = Family(
    block=block,
    shapes=three(
        "command-r",
        GROUPED | {"base": 8e6, "logit_scale": 0.6, "tied": True},
        {
            "heads": 4,
            "kv_heads": 1,
            "head_size": 10,
            "embd": 40,
            "tied": True,
            "eps": 1e-6,
            "logit_scale": 1.5,
            "large": True,
        },
        SINGLE | {"base": 500.0, "logit_scale": 0.9, "tied": True},
        CommandRShape,
    ),
    config="CohereConfig",
    model="CohereForCausalLM",
    keys=keys,
    dropped_keys=lambda shape: {"attention.layer_norm_rms_epsilon"},
    settings=lambda shape: settings(shape) | {"use_qk_norm": shape.large},
    # llama.cpp knows Command R+ by its number of blocks
    llama_cpp_shape=lambda shape: replace(shape, layers=64) if shape.large else shape,
    without_adapter=tuple(mine for mine, _, _ in NORMS_OF_EACH_HEAD),
    initial=initial_norms_of_each_head,
)
