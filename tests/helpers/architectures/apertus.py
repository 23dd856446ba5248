"""Apertus."""

from typing import Any

import numpy as np

from tests.helpers.architecture_family import (
    ATTENTION,
    BROAD,
    GROUPED,
    HEAD_NORMS,
    OWN,
    UNGATED,
    Family,
    Shape,
    rotary_keys,
    three,
)

BETA, EPS = 0.5, -1e-6


def alphas(shape: Shape) -> dict[str, list[float]]:
    """Return two numbers for each block."""
    return {
        "alpha_n": [-1.0 + 0.4 * layer for layer in range(shape.layers)],
        "alpha_p": [0.2 - 0.5 * layer for layer in range(shape.layers)],
    }


def keys(shape: Shape) -> dict[str, Any]:
    """Return the metadata."""
    lists = alphas(shape) | {"beta": [BETA] * shape.layers, "eps": [EPS] * shape.layers}
    return rotary_keys(shape) | {f"xielu.{name}": values for name, values in lists.items()}


def constants(shape: Shape) -> dict[str, np.ndarray]:
    """Return what Hugging Face's model keeps with its weights."""
    made = {}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}.mlp.act_fn"
        for name, values in alphas(shape).items():
            made[f"{prefix}.{name}"] = np.array([values[layer]], np.float32)
        made |= {f"{prefix}.beta": np.float32(BETA), f"{prefix}.eps": np.float32(EPS)}
    return made


FAMILY = Family(
    block=[
        ("attn_norm.weight", "attention_layernorm.weight", "embd"),
        ("ffn_norm.weight", "feedforward_layernorm.weight", "embd"),
        *ATTENTION,
        *HEAD_NORMS,
        *UNGATED,
    ],
    shapes=three(
        "apertus", GROUPED | {"base": 1e6, "layers": 3}, OWN | {"eps": 1e-6}, BROAD | {"base": 500.0}
    ),
    config="ApertusConfig",
    model="ApertusForCausalLM",
    keys=keys,
    whole_keys=lambda key: key.startswith("xielu."),
    their_constants=constants,
)
