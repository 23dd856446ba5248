"""GLM 4 (GLM Team 2024): norms before and after each half of a block, one matrix for gate and up, heads that rotate in part.

The heads rotate in pairs in Hugging Face's library, too.
"""

from dataclasses import replace

from llamatrain.graph import ops as O
from llamatrain.graph.ops import swiglu_halves
from llamatrain.graph.tensor import Tensor
from llamatrain.model import layers
from llamatrain.model.architecture import Architecture
from llamatrain.model.architectures import phi3
from llamatrain.model.forward import ForwardPass

ATTENTION = {name: replace(kind, rotary_heads=None) for name, kind in layers.ATTENTION.items()}
AFTER_ATTENTION = {"blk.{}.post_attention_norm.weight": layers.block_norm("post_self_attn_layernorm")}
AFTER_FEED_FORWARD = {"blk.{}.post_ffw_norm.weight": layers.block_norm("post_mlp_layernorm")}


def block(model: ForwardPass, layer: int, x: Tensor) -> Tensor:
    """Return the output of a block with norms before and after each half."""
    prefix = f"blk.{layer}"
    output = layers.attention(model, layer, model.norm(x, f"{prefix}.attn_norm"))
    x = O.add(model.keep_scored_rows(layer, x), model.norm(output, f"{prefix}.post_attention_norm"))
    gated = swiglu_halves(model.linear(model.norm(x, f"{prefix}.ffn_norm"), f"{prefix}.ffn_up"))
    return O.add(x, model.norm(model.linear(gated, f"{prefix}.ffn_down"), f"{prefix}.post_ffw_norm"))


ARCHITECTURE = Architecture(
    name="glm4",
    keys=layers.KEYS,
    weights=layers.EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | ATTENTION
    | layers.BIASES
    | AFTER_ATTENTION
    | layers.BEFORE_FEED_FORWARD
    | phi3.FEED_FORWARD
    | AFTER_FEED_FORWARD
    | layers.FINAL,
    rotation="pairs",
    embed=layers.embed,
    block=block,
    final_norm=layers.final_norm,
    partial_rotary=True,
    supported_values=layers.SUPPORTED_VALUES
    | {
        "rope.dimension_sections": (0, "a vision-language model"),
        "nextn_predict_layers": (0, "a block that predicts further tokens"),
    },
    unsupported_names={
        "chatglm": "a model with joined projections",
        "glm-dsa": "a mixture of experts",
    },
)
