"""OLMo 2 and 3 (OLMo Team 2024).

Norms after attention and feed-forward, and norms of whole queries and keys; OLMo 3 has windows.
"""

from collections.abc import Sequence

from llamatrain.graph import ops as O
from llamatrain.graph.tensor import Tensor
from llamatrain.model import layers
from llamatrain.model.architecture import Architecture, AttentionMask, Key, WindowPattern, is_windowed
from llamatrain.model.forward import ForwardPass
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.rope import Rope

KEYS = {
    "attention.sliding_window": Key("window", int, 0),
    "attention.sliding_window_pattern": WindowPattern("period", int, 4),
}
NORMS_OF_WHOLE_ROWS = {
    "blk.{}.attn_q_norm.weight": layers.block_vector("norm", lambda h: h.width, "self_attn.q_norm"),
    "blk.{}.attn_k_norm.weight": layers.block_vector("norm", lambda h: h.kv_width, "self_attn.k_norm"),
}
LAST_NORM = {"blk.{}.post_ffw_norm.weight": layers.block_norm("post_feedforward_layernorm")}


def attention(model: ForwardPass, layer: int, y: Tensor) -> Tensor:
    """Return the attention of a block that norms whole queries and keys."""
    h, prefix = model.h.for_block(layer), f"blk.{layer}"

    def project_and_rotate(name: str, count: int) -> Tensor:
        rows = model.norm(model.linear(y, f"{prefix}.{name}"), f"{prefix}.{name}_norm")
        return model.apply_rope(layer, model.split_heads(rows, count))

    q, k = project_and_rotate("attn_q", h.heads), project_and_rotate("attn_k", h.kv_heads)
    v = model.split_heads(model.linear(y, f"{prefix}.attn_v"), h.kv_heads)
    return model.linear(model.attention(layer, q, k, v), f"{prefix}.attn_output")


def block(model: ForwardPass, layer: int, x: Tensor) -> Tensor:
    """Return the output of a block that norms the output of each half."""
    prefix = f"blk.{layer}"
    output = attention(model, layer, x)
    y = O.add(model.keep_scored_rows(layer, x), model.norm(output, f"{prefix}.post_attention_norm"))
    return O.add(y, model.norm(layers.feed_forward(model, layer, y), f"{prefix}.post_ffw_norm"))


def has_window(h: Hyperparameters, layer: int) -> bool:
    """Return True if a block has a window."""
    return bool(h.extra["window"]) and is_windowed(int(h.extra["period"]), layer)


def attention_mask(h: Hyperparameters, layer: int) -> AttentionMask:
    """Return a block's mask."""
    return AttentionMask(
        scale=h.head_size**-0.5, window=int(h.extra["window"]) if has_window(h, layer) else 0
    )


def ropes(h: Hyperparameters) -> Sequence[Rope]:
    """Return the rotations: blocks with windows rotate without scaling."""
    return [h.rope, Rope(h.rope.size, base=h.rope.base)] if h.extra["window"] else [h.rope]


ARCHITECTURE = Architecture(
    name="olmo2",
    keys=layers.KEYS | KEYS,
    weights=layers.EMBEDDINGS
    | layers.ATTENTION
    | layers.BIASES
    | NORMS_OF_WHOLE_ROWS
    | layers.POST_ATTENTION_NORM
    | layers.FEED_FORWARD
    | LAST_NORM
    | layers.FINAL,
    rotation="halves",
    embed=layers.embed,
    block=block,
    final_norm=layers.final_norm,
    tied=False,
    heads_fill_width=True,
    ropes=ropes,
    rope_index=lambda h, layer: int(has_window(h, layer)),
    attention_mask=attention_mask,
    supported_values=layers.SUPPORTED_VALUES,
)
