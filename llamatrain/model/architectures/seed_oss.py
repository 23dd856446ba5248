"""Seed-OSS (ByteDance Seed 2025): a llama with biases and heads of their own size, which rotate in halves."""

from functools import partial

from llamatrain.model import layers
from llamatrain.model.architecture import Architecture

ARCHITECTURE = Architecture(
    name="seed_oss",
    keys=layers.KEYS,
    weights=layers.EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | layers.ATTENTION
    | layers.BIASES
    | layers.POST_ATTENTION_NORM
    | layers.FEED_FORWARD
    | layers.FINAL,
    rotation="halves",
    embed=layers.embed,
    block=partial(layers.block, ffn_norm="post_attention_norm"),
    final_norm=layers.final_norm,
    supported_values=layers.SUPPORTED_VALUES,
)
