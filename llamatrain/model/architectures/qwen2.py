"""Qwen 2 and 2.5 (Yang et al. 2024): a llama with biases of queries, keys and values.

The heads rotate in halves.
"""

from dataclasses import replace

from llamatrain.model import layers
from llamatrain.model.architecture import Architecture

BIASES = {name: replace(kind, optional=False) for name, kind in layers.BIASES.items()}

WEIGHTS = (
    layers.EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | layers.ATTENTION
    | BIASES
    | layers.BEFORE_FEED_FORWARD
    | layers.FEED_FORWARD
    | layers.FINAL
)

ARCHITECTURE = Architecture(
    name="qwen2",
    keys=layers.KEYS,
    weights=WEIGHTS,
    rotation="halves",
    embed=layers.embed,
    block=layers.block,
    final_norm=layers.final_norm,
    heads_fill_width=True,
    supported_values=layers.SUPPORTED_VALUES,
)
