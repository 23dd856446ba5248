"""Gemma 1 (Gemma Team 2024): a llama with GeGLU, scaled embeddings, and heads of their own size."""

from functools import partial

from llamatrain.graph.ops import geglu
from llamatrain.model import layers
from llamatrain.model.architecture import Architecture
from llamatrain.model.architectures import gemma2

ARCHITECTURE = Architecture(
    name="gemma",
    keys=layers.KEYS,
    weights=layers.WEIGHTS,
    rotation="halves",
    embed=gemma2.embed,
    block=partial(layers.block, transform=partial(layers.feed_forward, gate=geglu)),
    final_norm=layers.final_norm,
    partial_rotary=True,
    tied=True,
    ties_by_default=True,
    supported_values=layers.SUPPORTED_VALUES,
)
