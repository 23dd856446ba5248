"""MiniCPM, as a Granite: its own code is not part of Hugging Face's library."""

from typing import Any

from tests.helpers.architecture_family import (
    ATTENTION,
    BEFORE,
    FORWARD,
    GROUPED,
    SINGLE,
    Family,
    Numbers,
    Shape,
    three,
)


def keys(shape: Shape) -> Numbers:
    """Return the metadata."""
    return {
        "embedding_scale": shape.embedding_scale,
        "residual_scale": shape.residual_scale,
        "logit_scale": shape.logit_scale,
    }


def settings(shape: Shape) -> dict[str, Any]:
    """Return the configuration."""
    return {
        "embedding_multiplier": shape.embedding_scale,
        "residual_multiplier": shape.residual_scale,
        "attention_multiplier": shape.head_size**-0.5,
        "logits_scaling": shape.logit_scale,
    }


SECOND = {"heads": 4, "kv_heads": 1, "head_size": 10, "embd": 40, "tied": True, "embedding_scale": 6.0}
FAMILY = Family(
    block=[*BEFORE, *ATTENTION, *FORWARD],
    shapes=three(
        "minicpm",
        GROUPED | {"embedding_scale": 3.0, "residual_scale": 0.6, "logit_scale": 1.7},
        SECOND | {"residual_scale": 0.22, "logit_scale": 0.5},
        SINGLE | {"embedding_scale": 0.5, "residual_scale": 1.5, "logit_scale": 3.0, "base": 1e6},
    ),
    config="GraniteConfig",
    model="GraniteForCausalLM",
    pairs=True,
    keys=keys,
    settings=settings,
)
