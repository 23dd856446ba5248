"""Phi 3 and 4 (Abdin et al. 2024): one matrix for queries, keys and values, one for gate and up, and factors for long rows.

Some of its files name a window. llama.cpp ignores it and attends to all keys; so do these blocks.
"""

from functools import partial

from llamatrain.graph.ops import swiglu_halves
from llamatrain.graph.tensor import Tensor
from llamatrain.model import layers
from llamatrain.model.architecture import Architecture
from llamatrain.model.forward import ForwardPass

FEED_FORWARD = {
    "blk.{}.ffn_up.weight": layers.block_matrix(lambda h: 2 * h.ff, lambda h: h.embd, "mlp.gate_up_proj"),
    "blk.{}.ffn_down.weight": layers.FEED_FORWARD["blk.{}.ffn_down.weight"],
}


def feed_forward(model: ForwardPass, layer: int, y: Tensor) -> Tensor:
    """Return the output of the feed-forward part, whose gates and values one matrix computes."""
    return model.linear(swiglu_halves(model.linear(y, f"blk.{layer}.ffn_up")), f"blk.{layer}.ffn_down")


ARCHITECTURE = Architecture(
    name="phi3",
    keys=layers.KEYS,
    weights=layers.EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | layers.JOINED_ATTENTION
    | layers.BEFORE_FEED_FORWARD
    | FEED_FORWARD
    | layers.FINAL,
    rotation="halves",
    embed=layers.embed,
    block=partial(layers.block, transform=feed_forward),
    final_norm=layers.final_norm,
    partial_rotary=True,
    heads_fill_width=True,
    supported_values=layers.SUPPORTED_VALUES,
    unsupported_names={"phimoe": "a mixture of experts"},
)
