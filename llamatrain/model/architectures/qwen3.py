"""Qwen 3 (Yang et al. 2025): each head of queries and keys is normed before it rotates, in halves."""

from functools import partial

from llamatrain.model import layers
from llamatrain.model.architecture import Architecture
from llamatrain.model.forward import ForwardPass

WEIGHTS = (
    layers.EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | layers.ATTENTION
    | layers.BIASES
    | layers.HEAD_NORMS
    | layers.BEFORE_FEED_FORWARD
    | layers.FEED_FORWARD
    | layers.FINAL
)

ARCHITECTURE = Architecture(
    name="qwen3",
    keys=layers.KEYS,
    weights=WEIGHTS,
    rotation="halves",
    embed=layers.embed,
    block=partial(layers.block, norm_heads=ForwardPass.norm),
    final_norm=layers.final_norm,
    supported_values=layers.SUPPORTED_VALUES,
)
