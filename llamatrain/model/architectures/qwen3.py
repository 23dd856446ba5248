"""Qwen 3: each head of queries and keys is normed before it turns, in halves (Yang et al. 2025)."""

from functools import partial

from llamatrain.model import usual
from llamatrain.model.architecture import Architecture

ARCHITECTURE = Architecture(
    name="qwen3",
    keys=usual.KEYS,
    weights=usual.EMBEDDINGS
    | usual.BEFORE_ATTENTION
    | usual.ATTENTION
    | usual.BIASES
    | usual.HEAD_NORMS
    | usual.BEFORE_FEED_FORWARD
    | usual.FEED_FORWARD
    | usual.LAST,
    rotation="halves",
    embed=usual.embed,
    block=partial(usual.block, normed=True),
    last=usual.last,
    refused=usual.REFUSED,
    relatives={
        "qwen3moe": "a mixture of experts",
        "qwen3next": "a hybrid, of attention and of blocks that recur",
        "qwen3vl": "a model that sees",
        "qwen3vlmoe": "a mixture of experts that sees",
        "qwen35": "a hybrid, of attention and of blocks that recur",
        "qwen35moe": "a hybrid of experts, of attention and of blocks that recur",
    },
)
