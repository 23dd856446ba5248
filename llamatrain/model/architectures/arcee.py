"""Arcee's foundation models (Arcee AI 2025): a llama whose feed-forward has no gate, and squares a ReLU."""

from functools import partial

from llamatrain.model import layers
from llamatrain.model.architecture import Architecture

ARCHITECTURE = Architecture(
    name="arcee",
    keys=layers.KEYS,
    weights=layers.EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | layers.ATTENTION
    | layers.BIASES
    | layers.BEFORE_FEED_FORWARD
    | layers.UNGATED
    | layers.FINAL,
    rotation="pairs",
    embed=layers.embed,
    block=partial(layers.block, transform=layers.ungated),
    final_norm=layers.final_norm,
    supported_values=layers.SUPPORTED_VALUES,
    unsupported_names={"afmoe": "a mixture of experts"},
)
