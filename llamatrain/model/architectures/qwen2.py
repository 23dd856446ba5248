"""Qwen 2 and 2.5: a llama with biases behind queries, keys and values, whose heads turn in halves (Yang et al. 2024)."""

from dataclasses import replace

from llamatrain.model import usual
from llamatrain.model.architecture import Architecture

BIASES = {name: replace(kind, optional=False) for name, kind in usual.BIASES.items()}

ARCHITECTURE = Architecture(
    name="qwen2",
    keys=usual.KEYS,
    weights=usual.EMBEDDINGS
    | usual.BEFORE_ATTENTION
    | usual.ATTENTION
    | BIASES
    | usual.BEFORE_FEED_FORWARD
    | usual.FEED_FORWARD
    | usual.LAST,
    rotation="halves",
    embed=usual.embed,
    block=usual.block,
    last=usual.last,
    narrow=True,
    refused=usual.REFUSED,
    relatives={"qwen2moe": "a mixture of experts", "qwen2vl": "a model that sees"},
)
