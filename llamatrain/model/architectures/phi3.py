"""Phi 3 and 4: one matrix for queries, keys and values, one for gate and up, factors for long rows (Abdin et al. 2024).

Some of its files name a window. llama.cpp sees all keys nonetheless; so do these blocks.
"""

from llamatrain.graph import ops as O
from llamatrain.graph.ops import split_columns, swiglu_halves
from llamatrain.graph.tensor import Tensor
from llamatrain.model import layers
from llamatrain.model.architecture import Architecture
from llamatrain.model.forward import ForwardPass

ATTENTION = {
    "blk.{}.attn_qkv.weight": layers.matrix(
        lambda h: h.width + 2 * h.kv_width, lambda h: h.embd, "self_attn.qkv_proj"
    ),
    "blk.{}.attn_output.weight": layers.ATTENTION["blk.{}.attn_output.weight"],
}
FEED_FORWARD = {
    "blk.{}.ffn_up.weight": layers.matrix(lambda h: 2 * h.ff, lambda h: h.embd, "mlp.gate_up_proj"),
    "blk.{}.ffn_down.weight": layers.FEED_FORWARD["blk.{}.ffn_down.weight"],
}


def block(model: ForwardPass, layer: int, x: Tensor) -> Tensor:
    h, at = model.h, f"blk.{layer}"
    together = model.linear(model.norm(x, f"{at}.attn_norm"), f"{at}.attn_qkv")
    parts = split_columns(together, sizes=(h.width, h.kv_width, h.kv_width))
    q, k, v = (
        model.heads(part, count) for part, count in zip(parts, (h.heads, h.kv_heads, h.kv_heads), strict=True)
    )
    seen = model.attended(layer, model.rotated(layer, q), model.rotated(layer, k), v)
    x = O.add(model.going_on(layer, x), model.linear(seen, f"{at}.attn_output"))
    gated = swiglu_halves(model.linear(model.norm(x, f"{at}.ffn_norm"), f"{at}.ffn_up"))
    return O.add(x, model.linear(gated, f"{at}.ffn_down"))


ARCHITECTURE = Architecture(
    name="phi3",
    keys=layers.KEYS,
    weights=layers.EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | ATTENTION
    | layers.BEFORE_FEED_FORWARD
    | FEED_FORWARD
    | layers.LAST,
    rotation="halves",
    embed=layers.embed,
    block=block,
    last=layers.last,
    partly=True,
    narrow=True,
    refused=layers.REFUSED,
    relatives={"phi2": "a model with other norms", "phimoe": "a mixture of experts"},
)
