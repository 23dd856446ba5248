"""LFM 2 (Liquid AI 2025): most blocks have a gated short convolution instead of attention.

A block has attention if it has key/value heads. In files, the model's last norm has the name of one of
embeddings.
"""

from typing import Any

from llamatrain.graph import ops as O
from llamatrain.graph.ops import split_columns
from llamatrain.graph.tensor import Tensor
from llamatrain.model import layers
from llamatrain.model.architecture import Architecture, Key, Shape, WeightKind
from llamatrain.model.forward import ForwardPass
from llamatrain.model.hyperparameters import Hyperparameters

PERIOD = 3  # in new models, each third block has attention


def attends(h: Hyperparameters, layer: int) -> bool:
    """Return True if a block has attention."""
    return "kv_heads" not in h.by_block or h.by_block["kv_heads"][layer] > 0


def convolves(h: Hyperparameters, layer: int) -> bool:
    """Return True if a block has a convolution."""
    return not attends(h, layer)


def new_model_blocks(count: int, kv_heads: int) -> dict[str, tuple[int, ...]]:
    """Return the key/value heads of each block of a new model."""
    return {"kv_heads": tuple(kv_heads * (layer % PERIOD == PERIOD - 1) for layer in range(count))}


def projection(out: int, module: str, **facts: Any) -> layers.Weight:
    """Return a matrix of a convolution, `out` times as high as the model is wide."""
    return layers.block_matrix(
        lambda h: out * h.embd, lambda h: h.embd, f"conv.{module}", present=convolves, **facts
    )


ATTENTION: dict[str, layers.Weight] = {
    "blk.{}.attn_q.weight": layers.block_matrix(
        lambda h: h.width, lambda h: h.embd, "self_attn.q_proj", present=attends
    ),
    "blk.{}.attn_k.weight": layers.block_matrix(
        lambda h: h.kv_width, lambda h: h.embd, "self_attn.k_proj", present=attends
    ),
    "blk.{}.attn_v.weight": layers.block_matrix(
        lambda h: h.kv_width, lambda h: h.embd, "self_attn.v_proj", present=attends
    ),
    "blk.{}.attn_output.weight": layers.block_matrix(
        lambda h: h.embd, lambda h: h.width, "self_attn.out_proj", residual=True, present=attends
    ),
    "blk.{}.attn_q_norm.weight": layers.block_vector(
        "norm", lambda h: h.head_size, "self_attn.q_layernorm", present=attends
    ),
    "blk.{}.attn_k_norm.weight": layers.block_vector(
        "norm", lambda h: h.head_size, "self_attn.k_layernorm", present=attends
    ),
}
CONVOLUTION: dict[str, layers.Weight] = {
    "blk.{}.shortconv.in_proj.weight": projection(3, "in_proj"),
    "blk.{}.shortconv.conv.weight": WeightKind(
        role="taps",
        shape=lambda h: (h.embd, int(h.extra["taps"])),
        module="model.layers.{}.conv.conv",
        present=convolves,
    ),
    "blk.{}.shortconv.out_proj.weight": projection(1, "out_proj", residual=True),
}
FEED_FORWARD: dict[str, layers.Weight] = {
    "blk.{}.ffn_gate.weight": layers.block_matrix(lambda h: h.ff, lambda h: h.embd, "feed_forward.w1"),
    "blk.{}.ffn_up.weight": layers.block_matrix(lambda h: h.ff, lambda h: h.embd, "feed_forward.w3"),
    "blk.{}.ffn_down.weight": layers.block_matrix(
        lambda h: h.embd, lambda h: h.ff, "feed_forward.w2", residual=True
    ),
}
FINAL: dict[str, layers.Weight] = {
    "token_embd_norm.weight": WeightKind(
        role="norm", shape=lambda h: (h.embd,), module="model.embedding_norm"
    ),
    "output.weight": layers.FINAL["output.weight"],
}


def short_convolution(model: ForwardPass, layer: int, y: Tensor) -> Tensor:
    """Return the output of a convolution with a gate before and a gate behind it."""
    prefix, width = f"blk.{layer}.shortconv", model.h.embd
    before, behind, x = split_columns(model.linear(y, f"{prefix}.in_proj"), sizes=(width,) * 3)
    gated = O.reshape(O.mul(before, x), shape=(*model.tokens.shape, width))
    mixed = model.recurrence.convolve(layer, gated, model.weights[f"{prefix}.conv.weight"])
    mixed = O.mul(behind, O.reshape(mixed, shape=(model.tokens.size, width)))
    return model.linear(model.keep_scored_rows(layer, mixed), f"{prefix}.out_proj")


def block(model: ForwardPass, layer: int, x: Tensor) -> Tensor:
    """Return the output of a block: attention or a convolution, and a feed-forward part."""
    prefix = f"blk.{layer}"
    y = model.norm(x, f"{prefix}.attn_norm")
    has_attention = attends(model.h, layer)
    output = layers.attention(model, layer, y, True) if has_attention else short_convolution(model, layer, y)
    x = O.add(model.keep_scored_rows(layer, x), output)
    return O.add(x, layers.feed_forward(model, layer, model.norm(x, f"{prefix}.ffn_norm")))


def final_norm(model: ForwardPass, x: Tensor) -> Tensor:
    """Return the norm before the output weight."""
    return model.norm(x, "token_embd_norm")


def states(h: Hyperparameters, layer: int) -> dict[str, Shape]:
    """Return the state that a block keeps while decoding: the last inputs of the convolution."""
    return {} if attends(h, layer) else {"conv": (int(h.extra["taps"]) - 1, h.embd)}


ARCHITECTURE = Architecture(
    name="lfm2",
    keys=layers.KEYS | {"shortconv.l_cache": Key("taps", int, 3, min_value=2)},
    weights=layers.EMBEDDINGS
    | {"blk.{}.attn_norm.weight": layers.block_norm("operator_norm")}
    | ATTENTION
    | CONVOLUTION
    | {"blk.{}.ffn_norm.weight": layers.block_norm("ffn_norm")}
    | FEED_FORWARD
    | FINAL,
    rotation="halves",
    embed=layers.embed,
    block=block,
    final_norm=final_norm,
    heads_fill_width=True,
    ties_by_default=True,
    states=states,
    shifts_context=False,
    new_model_blocks=new_model_blocks,
    supported_values=layers.SUPPORTED_VALUES,
    unsupported_names={"lfm2moe": "a mixture of experts with short convolutions"},
)
