"""Granite 3 and 4."""

from typing import Any

from tests.helpers.architecture_family import (
    ATTENTION,
    BEFORE,
    FORWARD,
    GROUPED,
    OWN,
    SINGLE,
    Family,
    Numbers,
    Shape,
    rotary_keys,
    three,
)


def keys(shape: Shape) -> Numbers:
    """Return the metadata."""
    return rotary_keys(shape) | {
        "embedding_scale": shape.embedding_scale,
        "residual_scale": shape.residual_scale,
        "attention.scale": shape.score_scale,
        "logit_scale": shape.logit_scale,
    }


def settings(shape: Shape) -> dict[str, Any]:
    """Return the configuration."""
    return {
        "embedding_multiplier": shape.embedding_scale,
        "residual_multiplier": shape.residual_scale,
        "attention_multiplier": shape.score_scale,
        "logits_scaling": shape.logit_scale,
    }


FIRST = {"embedding_scale": 3.0, "residual_scale": 0.6, "score_scale": 0.41, "logit_scale": 1.7}
SECOND = {"embedding_scale": 6.0, "residual_scale": 0.22, "score_scale": 0.1, "logit_scale": 0.5}
THIRD = {"embedding_scale": 0.5, "residual_scale": 1.5, "score_scale": 0.7, "logit_scale": 3.0, "base": 1e6}
FAMILY = Family(
    block=[*BEFORE, *ATTENTION, *FORWARD],
    shapes=three("granite", GROUPED | FIRST, OWN | SECOND | {"tied": True}, SINGLE | THIRD),
    config="GraniteConfig",
    model="GraniteForCausalLM",
    pairs=True,
    keys=keys,
    settings=settings,
)
