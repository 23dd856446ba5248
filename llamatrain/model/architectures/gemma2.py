"""Gemma 2 (Gemma Team 2024).

Norms before and after each half of a block, GeGLU, capped scores and logits, and a window in every second
block.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from llamatrain.graph import ops as O
from llamatrain.graph.ops import geglu
from llamatrain.graph.tensor import Tensor
from llamatrain.model import layers
from llamatrain.model.architecture import Architecture, AttentionMask, Key, WindowPattern, is_windowed
from llamatrain.model.forward import ForwardPass
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.rope import Rope

KEYS = {
    "attention.sliding_window": Key("window", int, 4096),
    "attention.sliding_window_pattern": WindowPattern("period", int, 2),
    "rope.freq_base_swa": Key("near_base", float, 0.0),
    "attn_logit_softcapping": Key("score_cap", float, 50.0),
    "final_logit_softcapping": Key("logit_cap", float, 30.0),
}
AFTER_ATTENTION = layers.POST_ATTENTION_NORM
BEFORE_FEED_FORWARD = {"blk.{}.ffn_norm.weight": layers.block_norm("pre_feedforward_layernorm")}
AFTER_FEED_FORWARD = {"blk.{}.post_ffw_norm.weight": layers.block_norm("post_feedforward_layernorm")}
LAYERS_27B = 46  # layers of the 27B model, which scales scores by width / heads


def embed(model: ForwardPass) -> Tensor:
    """Return the token embeddings, scaled by sqrt(width)."""
    return O.scale(layers.embed(model), by=math.sqrt(model.h.embd))


def block(model: ForwardPass, layer: int, x: Tensor, norm_heads: layers.Norm | None = None) -> Tensor:
    """Return the output of a block with norms before and after each half."""
    prefix = f"blk.{layer}"
    output = layers.attention(model, layer, model.norm(x, f"{prefix}.attn_norm"), norm_heads)
    x = O.add(model.keep_scored_rows(layer, x), model.norm(output, f"{prefix}.post_attention_norm"))
    output = layers.feed_forward(model, layer, model.norm(x, f"{prefix}.ffn_norm"), geglu)
    return O.add(x, model.norm(output, f"{prefix}.post_ffw_norm"))


def has_window(h: Hyperparameters, layer: int) -> bool:
    """Return True if a block has a window."""
    return bool(h.extra["window"]) and is_windowed(int(h.extra["period"]), layer)


def attention_mask(h: Hyperparameters, layer: int, layers_27b: int = LAYERS_27B) -> AttentionMask:
    """Return a block's mask. The 27B model scales scores by width / heads instead of the head size."""
    size = h.embd // h.heads if h.layers == layers_27b else h.head_size
    window = int(h.extra["window"]) if has_window(h, layer) else 0
    return AttentionMask(scale=size**-0.5, window=window, cap=h.extra.get("score_cap", 0.0))


def ropes(h: Hyperparameters) -> Sequence[Rope]:
    """Return the rotations: blocks with windows may have their own base."""
    window_base = h.extra["near_base"]
    return [h.rope, replace(h.rope, base=window_base)] if h.extra["window"] and window_base else [h.rope]


def rope_index(h: Hyperparameters, layer: int) -> int:
    """Return which rotation a block uses."""
    return int(len(h.ropes) > 1 and has_window(h, layer))


def logit_cap(h: Hyperparameters) -> float:
    """Return the soft cap of the logits."""
    return h.extra["logit_cap"]


ARCHITECTURE = Architecture(
    name="gemma2",
    keys=layers.KEYS | KEYS,
    weights=layers.EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | layers.ATTENTION
    | layers.BIASES
    | AFTER_ATTENTION
    | BEFORE_FEED_FORWARD
    | layers.FEED_FORWARD
    | AFTER_FEED_FORWARD
    | layers.FINAL,
    rotation="halves",
    embed=embed,
    block=block,
    final_norm=layers.final_norm,
    partial_rotary=True,
    tied=True,
    ropes=ropes,
    rope_index=rope_index,
    ties_by_default=True,
    attention_mask=attention_mask,
    logit_cap=logit_cap,
    supported_values=layers.SUPPORTED_VALUES,
)
