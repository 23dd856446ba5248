"""Falcon H1 (Falcon LLM Team 2025): each block has attention and the scan of Mamba 2 side by side.

The multipliers of Hugging Face's model are part of the weights in files, which do not say what they are.
"""

from dataclasses import replace

from llamatrain.graph import ops as O
from llamatrain.graph.ops import rms_norm
from llamatrain.graph.tensor import Tensor
from llamatrain.model import layers
from llamatrain.model.architecture import Architecture, Shape
from llamatrain.model.architectures import granitehybrid, qwen35
from llamatrain.model.forward import ForwardPass
from llamatrain.model.hyperparameters import Hyperparameters

NORM = "blk.{}.ssm_norm.weight"
SCAN = granitehybrid.SCAN | {NORM: replace(granitehybrid.SCAN[NORM], optional=True)}
BEFORE_FEED_FORWARD = {"blk.{}.ffn_norm": layers.block_norm("pre_ff_layernorm")}  # a name without an end
FEED_FORWARD = layers.rename_modules(
    layers.FEED_FORWARD,
    {name: f"feed_forward.{name[4:]}_proj" for name in ("ffn_gate", "ffn_up", "ffn_down")},
)
FINAL = {
    "output_norm.weight": replace(layers.FINAL["output_norm.weight"], module="model.final_layernorm"),
    "output.weight": layers.FINAL["output.weight"],
}


def block(model: ForwardPass, layer: int, x: Tensor) -> Tensor:
    """Return the output of a block: attention and a scan of the same rows, and a feed-forward part."""
    prefix = f"blk.{layer}"
    y = model.norm(x, f"{prefix}.attn_norm")
    both = O.add(layers.attention(model, layer, y), granitehybrid.scan(model, layer, y))
    x = O.add(model.keep_scored_rows(layer, x), both)
    normed = rms_norm(x, model.weights.norm_weight(f"{prefix}.ffn_norm"), eps=model.h.rms_eps)
    return O.add(x, layers.feed_forward(model, layer, normed))


def states(h: Hyperparameters, layer: int) -> dict[str, Shape]:
    """Return the state that a block keeps while decoding, besides its keys and values."""
    return qwen35.rule_states(h)


ARCHITECTURE = Architecture(
    name="falcon-h1",
    keys=layers.KEYS | granitehybrid.KEYS,
    weights=layers.EMBEDDINGS
    | SCAN
    | layers.ATTENTION
    | layers.BIASES
    | layers.BEFORE_ATTENTION
    | BEFORE_FEED_FORWARD
    | FEED_FORWARD
    | FINAL,
    rotation="halves",
    embed=layers.embed,
    block=block,
    final_norm=layers.final_norm,
    states=states,
    check=qwen35.check,
    shifts_context=False,
    new_model_values=granitehybrid.NEW_SCAN,
    peft_problem="its files have the multipliers of Hugging Face's model in their weights and do not name them",
    supported_values=layers.SUPPORTED_VALUES,
)
