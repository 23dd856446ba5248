"""gpt-oss (OpenAI 2025): mixtures of experts with biases and clipped gates, and attention with sinks.

Every second block has a window. The softmax of each head has one more score, its sink, which has no value.
In Hugging Face's models, the rows of gates and values alternate.
"""

from dataclasses import replace
from functools import partial

import numpy as np

from llamatrain.graph.ops import clipped_swiglu
from llamatrain.model import experts, layers
from llamatrain.model.architecture import Architecture, AttentionMask, Key, is_windowed
from llamatrain.model.hyperparameters import Hyperparameters

PERIOD = 2  # of blocks, the last of which has no window
SLOPE, LIMIT = 1.702, 7.0  # of gates
KEYS = {"attention.sliding_window": Key("window", int, 128, min_value=1)}
gate = partial(clipped_swiglu, slope=SLOPE, limit=LIMIT)


def attention_mask(h: Hyperparameters, layer: int) -> AttentionMask:
    """Return the mask of a block."""
    window = int(h.extra["window"]) if is_windowed(PERIOD, layer) else 0
    return AttentionMask(scale=h.head_size**-0.5, window=window)


def expert_bias(size: layers.Size, module: str) -> layers.Weight:
    """Return the biases of all experts of a block, a row for each."""
    return layers.block_weight("bias", lambda h: (int(h.extra["experts"]), size(h)), module)


def alternate_rows(first: int, kind: layers.Weight) -> layers.Weight:
    """Return gates (0) or values (1) of experts whose rows alternate in one weight."""
    return replace(
        kind, part=(first, 2), row_order=lambda h: np.arange(first, 2 * int(h.extra["expert_ff"]), 2)
    )


SINKS = {"blk.{}.attn_sinks.weight": layers.block_vector("bias", lambda h: h.heads, "self_attn.sinks")}
INNER_BIAS = expert_bias(experts.count("expert_ff"), "mlp.experts.gate_up_proj_bias")
BIASES: dict[str, layers.Weight] = {
    "blk.{}.ffn_gate_inp.bias": layers.block_vector("bias", experts.count("experts"), "mlp.router.bias"),
    "blk.{}.ffn_gate_exps.bias": alternate_rows(0, INNER_BIAS),
    "blk.{}.ffn_up_exps.bias": alternate_rows(1, INNER_BIAS),
    "blk.{}.ffn_down_exps.bias": expert_bias(experts.width, "mlp.experts.down_proj_bias"),
}
EXPERTS = experts.EXPERTS | {
    name: alternate_rows(first, experts.EXPERTS[name])
    for first, name in enumerate(("blk.{}.ffn_gate_exps.weight", "blk.{}.ffn_up_exps.weight"))
}
ATTENTION_BIASES = layers.BIASES | layers.OUTPUT_BIAS

ARCHITECTURE = Architecture(
    name="gpt-oss",
    keys=experts.KEYS | layers.KEYS | experts.FEED_FORWARD_LENGTH | KEYS,
    weights=layers.EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | layers.ATTENTION
    | ATTENTION_BIASES
    | SINKS
    | layers.POST_ATTENTION_NORM
    | experts.router("mlp.router")
    | EXPERTS
    | BIASES
    | layers.FINAL,
    rotation="halves",
    embed=layers.embed,
    block=partial(
        layers.block,
        ffn_norm="post_attention_norm",
        transform=partial(experts.feed_forward, gate=gate, routing=experts.Routing(normalized=True)),
    ),
    final_norm=layers.final_norm,
    attention_mask=attention_mask,
    check=experts.check,
    new_model_values=experts.NEW_MODEL_VALUES,
    new_model_weights=frozenset(ATTENTION_BIASES),
    supported_values=layers.CAUSAL,
)
