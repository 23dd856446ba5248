"""Gemma 4 (Gemma Team 2026), the text models.

Gemma 3 with other heads in blocks with windows, normed values, scores without a scale, and an output scale of
each block. Small models have an embedding of each token for each block besides, and their last blocks read
the keys and values of earlier ones. A model with experts has them and a feed-forward part in each block; a
router scores them by the block's normed input.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llamatrain.graph import ops as O
from llamatrain.graph.ops import geglu, rms_norm, split_columns
from llamatrain.graph.tensor import Tensor
from llamatrain.model import experts, layers
from llamatrain.model.architecture import Architecture, AttentionMask, Key, Shape, WeightKind, is_windowed
from llamatrain.model.architectures import gemma2
from llamatrain.model.forward import ForwardPass
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.limits import BadHyperparameter
from llamatrain.model.rope import WINDOW_ROPE_SIZE, Rope

KEYS = {
    "attention.key_length_swa": Key("window_head_size", min_value=1),
    "attention.value_length_swa": Key("window_head_size", min_value=1),
    WINDOW_ROPE_SIZE: Key("window_rope_size", int, lambda known: known["window_head_size"]),
    "rope.freq_base_swa": Key("near_base", float, 10000.0, min_value=1),
    "attention.sliding_window": Key("window"),
    "attention.sliding_window_pattern": Key("windowed", bool, by_block=True),
    "attention.shared_kv_layers": Key("shared_kv_blocks", int, 0),
    "embedding_length_per_layer_input": Key("per_layer_size"),
    "final_logit_softcapping": Key("logit_cap", float, 30.0),
}
PERIOD = 6  # of new models: the last block of each period has no window
ROTATED_SHARE = 0.25  # of new models: the pairs that rotate in blocks without a window
NO_ROTATION = 1e30  # the factor of pairs that do not rotate


# ---- hyperparameters -------------------------------------------------------


def has_window(h: Hyperparameters, layer: int) -> bool:
    """Return True if a block has a window."""
    return bool(h.by_block["windowed"][layer])


def kv_block(h: Hyperparameters, layer: int) -> int:
    """Return the block whose keys and values a block reads: the last that has its own and is of its kind."""
    first = h.layers - int(h.extra["shared_kv_blocks"])
    if layer < first:
        return layer
    kind = has_window(h, layer)
    found = next((each for each in reversed(range(first)) if has_window(h, each) == kind), None)
    if found is None:
        raise BadHyperparameter(
            "shared_kv_blocks",
            f"{h.layers - first}",
            "must leave a block with a window and one without to read from",
        )
    return found


def window_rope(h: Hyperparameters) -> Rope:
    """Return the rotation of blocks with windows: scaling applies to others, the length factor to all."""
    size, head_size = int(h.extra["window_rope_size"]), int(h.extra["window_head_size"])
    if size % 2 or not 0 < size <= head_size:
        raise BadHyperparameter(
            "window_rope_size", f"{size}", f"must be even and at most the size of these heads, {head_size}"
        )
    return Rope(size, base=h.extra["near_base"], length=h.rope.length)


def block_values(h: Hyperparameters, layer: int) -> Mapping[str, Any]:
    """Return the size of heads and the rotation of blocks with windows."""
    kv_block(h, layer)
    if not has_window(h, layer):
        return {}
    return {"head_size": int(h.extra["window_head_size"]), "rope": window_rope(h)}


def attention_mask(h: Hyperparameters, layer: int) -> AttentionMask:
    """Return a block's mask; queries and keys are normed, and their scores have no scale."""
    return AttentionMask(scale=1.0, window=int(h.extra["window"]) if has_window(h, layer) else 0)


def has_per_layer_inputs(h: Hyperparameters, layer: int = 0) -> bool:
    """Return True if each block has an embedding of each token."""
    return h.extra["per_layer_size"] > 0


def per_layer_size(h: Hyperparameters) -> int:
    """Return the width of the embeddings for one block."""
    return int(h.extra["per_layer_size"])


def per_layer_width(h: Hyperparameters) -> int:
    """Return the width of the embeddings for all blocks together."""
    return h.layers * per_layer_size(h)


def new_blocks(count: int, kv_heads: int) -> dict[str, tuple[bool, ...]]:
    """Return which blocks of a new model have windows: all but each sixth and the last."""
    return {"windowed": tuple(layer < count - 1 and is_windowed(PERIOD, layer) for layer in range(count))}


def new_rope(rope: Rope) -> Rope:
    """Return the rotation of a new model's blocks without windows, of which a quarter of the pairs rotates."""
    pairs = rope.size // 2
    factors = np.where(np.arange(pairs) < max(1, int(pairs * ROTATED_SHARE)), 1.0, NO_ROTATION)
    return replace(rope, factors=factors.astype(np.float32))


# ---- weights ---------------------------------------------------------------


def has_own_keys(h: Hyperparameters, layer: int) -> bool:
    """Return True if a block has keys and values of its own."""
    return kv_block(h, layer) == layer


ATTENTION: dict[str, layers.Weight] = layers.ATTENTION | layers.HEAD_NORMS
ATTENTION |= {
    name: replace(ATTENTION[name], present=has_own_keys)
    for name in ("blk.{}.attn_k.weight", "blk.{}.attn_k_norm.weight")
}
VALUES = "blk.{}.attn_v.weight"  # in blocks that have none, keys before their norm are the values
ATTENTION[VALUES] = replace(ATTENTION[VALUES], present=has_own_keys, optional=True, optional_by_block=True)
PER_LAYER_EMBEDDINGS: dict[str, layers.Weight] = {
    "per_layer_token_embd.weight": WeightKind(
        role="table",
        shape=lambda h: (h.vocab, per_layer_width(h)),
        module="model.embed_tokens_per_layer",
        present=has_per_layer_inputs,
    ),
    "per_layer_model_proj.weight": WeightKind(
        role="matrix",
        shape=lambda h: (per_layer_width(h), h.embd),
        module="model.per_layer_model_projection",
        present=has_per_layer_inputs,
    ),
    "per_layer_proj_norm.weight": WeightKind(
        role="norm",
        shape=lambda h: (per_layer_size(h),),
        module="model.per_layer_projection_norm",
        present=has_per_layer_inputs,
    ),
}
PER_LAYER_INPUT = {
    "blk.{}.inp_gate.weight": layers.block_matrix(per_layer_size, lambda h: h.embd, "per_layer_input_gate"),
    "blk.{}.proj.weight": layers.block_matrix(
        lambda h: h.embd, per_layer_size, "per_layer_projection", residual=True
    ),
    "blk.{}.post_norm.weight": layers.block_norm("post_per_layer_input_norm"),
}
PER_LAYER_INPUT = layers.restrict_blocks(PER_LAYER_INPUT, has_per_layer_inputs)
OUTPUT_SCALE = {
    "blk.{}.layer_output_scale.weight": layers.block_vector(
        "constant", lambda h: 1, "layer_scalar", optional=True
    )
}

ROUTING = experts.Routing(normalized=True)
ROUTER, DOWN = "blk.{}.ffn_gate_inp.weight", "blk.{}.ffn_down_exps.weight"
STACKS = experts.joinable_stacks(experts.count("expert_ff"), "experts")


def ones(generator: np.random.Generator, shape: Shape) -> np.ndarray:
    """Return the initial factors of the router's input, and of the outputs of experts."""
    return np.ones(shape)


MIXTURE: dict[str, layers.Weight] = {
    "blk.{}.post_ffw_norm_1.weight": layers.block_norm("post_feedforward_layernorm_1"),
    "blk.{}.pre_ffw_norm_2.weight": layers.block_norm("pre_feedforward_layernorm_2"),
    "blk.{}.post_ffw_norm_2.weight": layers.block_norm("post_feedforward_layernorm_2"),
    "blk.{}.ffn_gate_inp.scale": layers.block_vector("bias", experts.width, "router.scale", initial=ones),
    # a linear layer, unlike routers of other models
    ROUTER: replace(experts.router()[ROUTER], module="model.layers.{}.router.proj", is_parameter=False),
    **STACKS,
    DOWN: replace(
        STACKS[DOWN],
        adapter_problem="llama.cpp would add it without the factors of experts, which PEFT multiplies it with",
    ),
    experts.SCALE: layers.block_vector(
        "bias", experts.count("experts"), "router.per_expert_scale", initial=ones
    ),
}


# ---- graph -----------------------------------------------------------------


def embed(model: ForwardPass) -> Tensor:
    """Return the token embeddings, scaled by sqrt(width); embeddings for each block are side inputs."""
    x = gemma2.embed(model)
    if has_per_layer_inputs(model.h):
        model.side_inputs.extend(per_layer_inputs(model, x))
    return x


def per_layer_inputs(model: ForwardPass, x: Tensor) -> Sequence[Tensor]:
    """Return an input for each block: the token's embedding for it and a projection of x, both of one size."""
    h, size, count = model.h, per_layer_size(model.h), model.h.layers
    projected = O.scale(model.linear(x, "per_layer_model_proj"), by=h.embd**-0.5)
    by_layer = O.reshape(projected, shape=(model.tokens.size, count, size))
    normed = O.reshape(model.norm(by_layer, "per_layer_proj_norm"), shape=projected.shape)
    embedded = O.scale(model.embedding("per_layer_token_embd"), by=math.sqrt(size))
    joined = O.scale(O.add(normed, embedded), by=math.sqrt(0.5))
    return [joined] if count == 1 else split_columns(joined, sizes=(size,) * count)


def attention(model: ForwardPass, layer: int, y: Tensor) -> Tensor:
    """Return the attention of normed queries, keys and values."""
    h, prefix = model.h.for_block(layer), f"blk.{layer}"

    def norm_and_rotate(x: Tensor, name: str, count: int) -> Tensor:
        return model.apply_rope(layer, model.norm(model.split_heads(x, count), f"{prefix}.{name}_norm"))

    q = norm_and_rotate(model.linear(y, f"{prefix}.attn_q"), "attn_q", h.heads)
    if model.h.kv_block(layer) != layer:
        return model.linear(model.attention(layer, q), f"{prefix}.attn_output")
    keys = model.linear(y, f"{prefix}.attn_k")
    values = model.linear(y, f"{prefix}.attn_v") if VALUES.format(layer) in model.weights else keys
    k = norm_and_rotate(keys, "attn_k", h.kv_heads)
    v = model.norm_without_weight(model.split_heads(values, h.kv_heads))
    return model.linear(model.attention(layer, q, k, v), f"{prefix}.attn_output")


def gate_side_input(model: ForwardPass, layer: int, x: Tensor) -> Tensor:
    """Return a block's own embedding of each token, gated by x and projected to the model's width."""
    prefix = f"blk.{layer}"
    side_input = model.keep_scored_rows(layer, model.side_inputs[layer])
    gated = geglu(model.linear(x, f"{prefix}.inp_gate"), side_input)
    return model.norm(model.linear(gated, f"{prefix}.proj"), f"{prefix}.post_norm")


def feed_forward(model: ForwardPass, layer: int, x: Tensor) -> Tensor:
    """Return the output of the feed-forward part for the normed x, and of experts."""
    prefix = f"blk.{layer}"
    output = layers.feed_forward(model, layer, model.norm(x, f"{prefix}.ffn_norm"), geglu)
    if not experts.has_experts(model.h):
        return output
    scale = O.scale(model.weights[f"{prefix}.ffn_gate_inp.scale"], by=model.h.embd**-0.5)
    scored = rms_norm(x, scale, eps=model.h.rms_eps)
    y = model.norm(x, f"{prefix}.pre_ffw_norm_2")
    mixed = experts.feed_forward(model, layer, y, geglu, ROUTING, scored)
    return O.add(
        model.norm(output, f"{prefix}.post_ffw_norm_1"), model.norm(mixed, f"{prefix}.post_ffw_norm_2")
    )


def block(model: ForwardPass, layer: int, x: Tensor) -> Tensor:
    """Return the output of a block with norms before and after each half, and a scale."""
    prefix = f"blk.{layer}"
    output = attention(model, layer, model.norm(x, f"{prefix}.attn_norm"))
    x = O.add(model.keep_scored_rows(layer, x), model.norm(output, f"{prefix}.post_attention_norm"))
    x = O.add(x, model.norm(feed_forward(model, layer, x), f"{prefix}.post_ffw_norm"))
    if model.side_inputs:
        x = O.add(x, gate_side_input(model, layer, x))
    scale = model.weights.get(f"{prefix}.layer_output_scale.weight")
    return x if scale is None else O.mul(x, scale)


ARCHITECTURE = Architecture(
    name="gemma4",
    keys=experts.OPTIONAL_KEYS | layers.KEYS | KEYS,
    weights=layers.EMBEDDINGS
    | PER_LAYER_EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | ATTENTION
    | gemma2.AFTER_ATTENTION
    | gemma2.BEFORE_FEED_FORWARD
    | layers.FEED_FORWARD
    | layers.restrict_blocks(MIXTURE, experts.has_experts)
    | gemma2.AFTER_FEED_FORWARD
    | PER_LAYER_INPUT
    | OUTPUT_SCALE
    | layers.FINAL,
    rotation="halves",
    embed=embed,
    block=block,
    final_norm=layers.final_norm,
    partial_rotary=True,
    ropes=lambda h: [h.rope, window_rope(h)],
    rope_index=lambda h, layer: int(has_window(h, layer)),
    kv_block=kv_block,
    block_values=block_values,
    attention_mask=attention_mask,
    check=experts.check_optional,
    logit_cap=gemma2.logit_cap,
    ties_by_default=True,
    new_model_values={
        "window": 512,
        "per_layer_size": 0,
        "window_head_size": lambda known: known["head_size"],
        "window_rope_size": lambda known: known["head_size"],
    },
    new_model_blocks=new_blocks,
    new_model_rope=new_rope,
    new_model_weights=frozenset({VALUES}),
    supported_values=layers.CAUSAL,
    unsupported_names={"gemma4-assistant": "a model that drafts tokens for another"},
)
