"""LFM 2 (Liquid AI 2025): most blocks have a gated short convolution instead of attention.

A block has attention if it has key/value heads. In files, the model's last norm has the name of one of
embeddings.
"""

from llamatrain.graph import ops as O
from llamatrain.graph.ops import split_columns
from llamatrain.graph.tensor import Tensor
from llamatrain.model import layers
from llamatrain.model.architecture import Architecture, Key, Shape, WeightKind
from llamatrain.model.forward import ForwardPass
from llamatrain.model.hyperparameters import Hyperparameters

KEYS = {"shortconv.l_cache": Key("taps", int, 3, min_value=2)}
PERIOD = 3  # in new models, each third block has attention


def attends(h: Hyperparameters, layer: int) -> bool:
    """Return True if a block has attention."""
    return "kv_heads" not in h.by_block or h.by_block["kv_heads"][layer] > 0


def convolves(h: Hyperparameters, layer: int) -> bool:
    """Return True if a block has a convolution."""
    return not attends(h, layer)


def new_model_blocks(count: int, kv_heads: int, period: int = PERIOD) -> dict[str, tuple[int, ...]]:
    """Return the key/value heads of each block of a new model: the last block of each period has some.

    If there are fewer blocks, so has the last of them.
    """
    period = min(period, count)
    return {"kv_heads": tuple(kv_heads * (layer % period == period - 1) for layer in range(count))}


MODULES = {
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
ATTENTION = layers.rename_modules(layers.ATTENTION | layers.HEAD_NORMS, MODULES)
CONVOLUTION: dict[str, layers.Weight] = {
    "blk.{}.shortconv.in_proj.weight": layers.block_matrix(
        lambda h: 3 * h.embd, lambda h: h.embd, "conv.in_proj"
    ),
    "blk.{}.shortconv.conv.weight": layers.block_taps(lambda h: h.embd, "conv.conv"),
    "blk.{}.shortconv.out_proj.weight": layers.block_matrix(
        lambda h: h.embd, lambda h: h.embd, "conv.out_proj", residual=True
    ),
}
MIXERS = {
    "blk.{}.attn_norm.weight": layers.block_norm("operator_norm"),
    **layers.restrict_blocks(ATTENTION, attends),
    **layers.restrict_blocks(CONVOLUTION, convolves),
    "blk.{}.ffn_norm.weight": layers.block_norm("ffn_norm"),
}
FEED_FORWARD = layers.rename_modules(layers.FEED_FORWARD, MODULES)
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


def block(
    model: ForwardPass, layer: int, x: Tensor, transform: layers.FeedForward = layers.feed_forward
) -> Tensor:
    """Return the output of a block: attention or a convolution, and a feed-forward part."""
    prefix = f"blk.{layer}"
    y = model.norm(x, f"{prefix}.attn_norm")
    if attends(model.h, layer):
        output = layers.attention(model, layer, y, norm_heads=ForwardPass.norm)
    else:
        output = short_convolution(model, layer, y)
    x = O.add(model.keep_scored_rows(layer, x), output)
    return O.add(x, transform(model, layer, model.norm(x, f"{prefix}.ffn_norm")))


def final_norm(model: ForwardPass, x: Tensor) -> Tensor:
    """Return the norm before the output weight."""
    return model.norm(x, "token_embd_norm")


def states(h: Hyperparameters, layer: int) -> dict[str, Shape]:
    """Return the state that a block keeps while decoding: the last inputs of the convolution."""
    return {} if attends(h, layer) else {"conv": (int(h.extra["taps"]) - 1, h.embd)}


ARCHITECTURE = Architecture(
    name="lfm2",
    keys=layers.KEYS | KEYS,
    weights=layers.EMBEDDINGS | MIXERS | FEED_FORWARD | FINAL,
    rotation="halves",
    embed=layers.embed,
    block=block,
    final_norm=final_norm,
    heads_fill_width=True,
    ties_by_default=True,
    attends=attends,
    states=states,
    shifts_context=False,
    new_model_blocks=new_model_blocks,
    supported_values=layers.SUPPORTED_VALUES,
)
