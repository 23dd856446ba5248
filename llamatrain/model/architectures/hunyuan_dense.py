"""Hunyuan without experts (Tencent 2025): a llama that norms each head of queries and keys after its rotation.

Its files have the base of the rotation that results from the alpha of the configuration.
"""

from llamatrain.graph import ops as O
from llamatrain.graph.tensor import Tensor
from llamatrain.model import layers
from llamatrain.model.architecture import Architecture
from llamatrain.model.forward import ForwardPass

HEAD_NORMS = {
    "blk.{}.attn_q_norm.weight": layers.block_vector(
        "norm", lambda h: h.head_size, "self_attn.query_layernorm"
    ),
    "blk.{}.attn_k_norm.weight": layers.block_vector(
        "norm", lambda h: h.head_size, "self_attn.key_layernorm"
    ),
}


def block(
    model: ForwardPass, layer: int, x: Tensor, transform: layers.FeedForward = layers.feed_forward
) -> Tensor:
    """Return the output of a pre-norm block that norms rotated heads."""
    prefix = f"blk.{layer}"

    def rotate_and_norm(heads: Tensor, name: str) -> Tensor:
        return model.norm(model.apply_rope(layer, heads), f"{prefix}.{name}_norm")

    output = layers.attend(model, layer, model.norm(x, f"{prefix}.attn_norm"), rotate_and_norm)
    x = O.add(model.keep_scored_rows(layer, x), output)
    return O.add(x, transform(model, layer, model.norm(x, f"{prefix}.ffn_norm")))


ARCHITECTURE = Architecture(
    name="hunyuan-dense",
    keys=layers.KEYS,
    weights=layers.EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | layers.ATTENTION
    | layers.BIASES
    | HEAD_NORMS
    | layers.BEFORE_FEED_FORWARD
    | layers.FEED_FORWARD
    | layers.FINAL,
    rotation="halves",
    embed=layers.embed,
    block=block,
    final_norm=layers.final_norm,
    supported_values=layers.SUPPORTED_VALUES,
    unsupported_names={"hunyuan_vl": "a vision-language model"},
)
