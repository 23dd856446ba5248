"""Phi 3 and 4 (Abdin et al. 2024): one matrix for queries, keys and values, one for gate and up, and factors for long rows.

Some of its files name a window. llama.cpp ignores it and attends to all keys; so do these blocks.
"""

from llamatrain.graph import ops as O
from llamatrain.graph.ops import split_columns, swiglu_halves
from llamatrain.graph.tensor import Tensor
from llamatrain.model import layers
from llamatrain.model.architecture import Architecture
from llamatrain.model.forward import ForwardPass

ATTENTION = {
    "blk.{}.attn_qkv.weight": layers.block_matrix(
        lambda h: h.width + 2 * h.kv_width, lambda h: h.embd, "self_attn.qkv_proj"
    ),
    "blk.{}.attn_output.weight": layers.ATTENTION["blk.{}.attn_output.weight"],
}
FEED_FORWARD = {
    "blk.{}.ffn_up.weight": layers.block_matrix(lambda h: 2 * h.ff, lambda h: h.embd, "mlp.gate_up_proj"),
    "blk.{}.ffn_down.weight": layers.FEED_FORWARD["blk.{}.ffn_down.weight"],
}


def block(model: ForwardPass, layer: int, x: Tensor) -> Tensor:
    """Return the output of a block with joined projections."""
    h, prefix = model.h.for_block(layer), f"blk.{layer}"
    qkv = model.linear(model.norm(x, f"{prefix}.attn_norm"), f"{prefix}.attn_qkv")
    parts = split_columns(qkv, sizes=(h.width, h.kv_width, h.kv_width))
    q, k, v = (
        model.split_heads(part, count)
        for part, count in zip(parts, (h.heads, h.kv_heads, h.kv_heads), strict=True)
    )
    attended = model.attention(layer, model.apply_rope(layer, q), model.apply_rope(layer, k), v)
    x = O.add(model.keep_scored_rows(layer, x), model.linear(attended, f"{prefix}.attn_output"))
    gated = swiglu_halves(model.linear(model.norm(x, f"{prefix}.ffn_norm"), f"{prefix}.ffn_up"))
    return O.add(x, model.linear(gated, f"{prefix}.ffn_down"))


ARCHITECTURE = Architecture(
    name="phi3",
    keys=layers.KEYS,
    weights=layers.EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | ATTENTION
    | layers.BEFORE_FEED_FORWARD
    | FEED_FORWARD
    | layers.FINAL,
    rotation="halves",
    embed=layers.embed,
    block=block,
    final_norm=layers.final_norm,
    partial_rotary=True,
    heads_fill_width=True,
    supported_values=layers.SUPPORTED_VALUES,
    unsupported_names={"phimoe": "a mixture of experts"},
)
