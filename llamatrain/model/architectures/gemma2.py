"""Gemma 2: norms before and behind each half of a block, gates by gelu, scores and logits that are capped, and windows of every
second block (Gemma Team 2024)."""

import math
from collections.abc import Sequence
from dataclasses import replace

from llamatrain.graph import ops as O
from llamatrain.graph.ops import geglu
from llamatrain.graph.tensor import Tensor
from llamatrain.model import layers
from llamatrain.model.architecture import Architecture, AttentionMask, Key, WindowPattern, windowed
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
BEHIND_ATTENTION = {"blk.{}.post_attention_norm.weight": layers.norm("post_attention_layernorm")}
BEFORE_FEED_FORWARD = {"blk.{}.ffn_norm.weight": layers.norm("pre_feedforward_layernorm")}
BEHIND_FEED_FORWARD = {"blk.{}.post_ffw_norm.weight": layers.norm("post_feedforward_layernorm")}
UNLIKE = 46  # blocks of the one model whose scores are scaled by what its width gives a head


def embed(model: ForwardPass) -> Tensor:
    return O.scale(layers.embed(model), by=math.sqrt(model.h.embd))


def block(model: ForwardPass, layer: int, x: Tensor, normed: bool = False) -> Tensor:
    at = f"blk.{layer}"
    made = layers.attention(model, layer, model.norm(x, f"{at}.attn_norm"), normed)
    x = O.add(model.going_on(layer, x), model.norm(made, f"{at}.post_attention_norm"))
    made = layers.feed_forward(model, layer, model.norm(x, f"{at}.ffn_norm"), geglu)
    return O.add(x, model.norm(made, f"{at}.post_ffw_norm"))


def near(h: Hyperparameters, layer: int) -> bool:
    """Whether a block has a window."""
    return bool(h.own["window"]) and windowed(int(h.own["period"]), layer)


def sight(h: Hyperparameters, layer: int, unlike: int = UNLIKE) -> AttentionMask:
    size = h.embd // h.heads if h.layers == unlike else h.head_size
    window = int(h.own["window"]) if near(h, layer) else 0
    return AttentionMask(scale=size**-0.5, window=window, cap=h.own.get("score_cap", 0.0))


def rotations(h: Hyperparameters) -> Sequence[Rope]:
    """Blocks with windows may turn by a base of their own."""
    near = h.own["near_base"]
    return [h.rope, replace(h.rope, base=near)] if h.own["window"] and near else [h.rope]


def turned(h: Hyperparameters, layer: int) -> int:
    return int(len(h.rotations) > 1 and near(h, layer))


def cap(h: Hyperparameters) -> float:
    return h.own["logit_cap"]


ARCHITECTURE = Architecture(
    name="gemma2",
    keys=layers.KEYS | KEYS,
    weights=layers.EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | layers.ATTENTION
    | layers.BIASES
    | BEHIND_ATTENTION
    | BEFORE_FEED_FORWARD
    | layers.FEED_FORWARD
    | BEHIND_FEED_FORWARD
    | layers.LAST,
    rotation="halves",
    embed=embed,
    block=block,
    last=layers.last,
    partly=True,
    tied=True,
    rotations=rotations,
    turned=turned,
    ties=True,
    sight=sight,
    cap=cap,
    refused=layers.REFUSED,
    relatives={"gemma": "a model of one norm before each half"},
)
