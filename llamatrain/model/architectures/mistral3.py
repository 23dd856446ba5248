"""Ministral 3 (Mistral AI 2025): a llama whose queries grow with their position in long rows.

Its rotation is scaled by YaRN. As queries are rotated as a whole, their rotation has their length, too.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from llamatrain.graph import ops as O
from llamatrain.graph.tensor import Tensor
from llamatrain.model import layers
from llamatrain.model.architecture import Architecture, Key
from llamatrain.model.forward import ForwardPass
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.rope import FAST_TURNS, SLOW_TURNS, Rope

KEYS = {
    "attention.temperature_scale": Key("temperature_scale", float, 0.0),
    "rope.scaling.yarn_log_multiplier": Key("yarn_log_multiplier", float, 0.0),
    "rope.scaling.yarn_beta_fast": Key("yarn_beta_fast", float, FAST_TURNS, min_value=1e-3),
    "rope.scaling.yarn_beta_slow": Key("yarn_beta_slow", float, SLOW_TURNS, min_value=1e-3),
}


def ropes(h: Hyperparameters) -> Sequence[Rope]:
    """Return the rotations of keys and of queries, or one for both."""
    growth = 0.1 * h.extra["yarn_log_multiplier"] * math.log(max(h.rope.factor, 1.0))
    rotation = replace(
        h.rope,
        length=h.rope.length / (1.0 + growth) if h.rope.kind == "yarn" else h.rope.length,
        original_ctx=h.rope.original_ctx or h.ctx,
        fast_turns=h.extra["yarn_beta_fast"],
        slow_turns=h.extra["yarn_beta_slow"],
    )
    temperature = h.extra["temperature_scale"]
    return [rotation, replace(rotation, temperature=temperature)] if temperature else [rotation]


def block(model: ForwardPass, layer: int, x: Tensor) -> Tensor:
    """Return the output of a pre-norm block with one rotation for queries and one for keys."""
    prefix = f"blk.{layer}"

    def rotate(heads: Tensor, name: str) -> Tensor:
        return model.rotate(heads, len(model.h.ropes) - 1 if name == "attn_q" else 0)

    output = layers.attend(model, layer, model.norm(x, f"{prefix}.attn_norm"), rotate)
    x = O.add(model.keep_scored_rows(layer, x), output)
    return O.add(x, layers.feed_forward(model, layer, model.norm(x, f"{prefix}.ffn_norm")))


ARCHITECTURE = Architecture(
    name="mistral3",
    keys=layers.KEYS | KEYS,
    weights=layers.WEIGHTS | layers.MORE_BIASES,
    rotation="pairs",
    embed=layers.embed,
    block=block,
    final_norm=layers.final_norm,
    ropes=ropes,
    supported_values=layers.SUPPORTED_VALUES,
    unsupported_names={"mistral4": "a mixture of experts"},
)
