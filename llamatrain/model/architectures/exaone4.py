"""EXAONE 4 (LG AI Research 2025): norms of the output of each half of a block, and normed heads.

The 32B model has windows in three of four blocks, and rotates heads in these alone.
"""

from llamatrain.graph import ops as O
from llamatrain.graph.tensor import Tensor
from llamatrain.model import layers
from llamatrain.model.architecture import Architecture, AttentionMask, Key, WindowPattern, is_windowed
from llamatrain.model.architectures import gemma2
from llamatrain.model.forward import ForwardPass
from llamatrain.model.hyperparameters import Hyperparameters

LAYERS_32B = 64  # layers of the 32B model; llama.cpp ignores the windows of others
KEYS = {
    "attention.sliding_window": Key(
        "window", int, lambda known: 4096 if known.get("layers") == LAYERS_32B else 0
    ),
    "attention.sliding_window_pattern": WindowPattern("period", int, 4),
}


def block(model: ForwardPass, layer: int, x: Tensor) -> Tensor:
    """Return the output of a block that norms heads, and the output of each half."""
    prefix = f"blk.{layer}"
    output = layers.attention(model, layer, x, norm_heads=ForwardPass.norm)
    y = O.add(model.keep_scored_rows(layer, x), model.norm(output, f"{prefix}.post_attention_norm"))
    return O.add(y, model.norm(layers.feed_forward(model, layer, y), f"{prefix}.post_ffw_norm"))


def has_windows(h: Hyperparameters) -> bool:
    """Return True if some blocks have a window."""
    return bool(h.extra["window"]) and h.layers == LAYERS_32B


def attention_mask(h: Hyperparameters, layer: int) -> AttentionMask:
    """Return a block's mask."""
    windowed = has_windows(h) and is_windowed(int(h.extra["period"]), layer)
    return AttentionMask(scale=h.head_size**-0.5, window=int(h.extra["window"]) if windowed else 0)


def rope_index(h: Hyperparameters, layer: int) -> int | None:
    """Return 0, the only rotation, or None for blocks without one."""
    return None if has_windows(h) and not is_windowed(int(h.extra["period"]), layer) else 0


ARCHITECTURE = Architecture(
    name="exaone4",
    keys=layers.KEYS | KEYS,
    weights=layers.EMBEDDINGS
    | layers.ATTENTION
    | layers.HEAD_NORMS
    | gemma2.AFTER_ATTENTION
    | layers.FEED_FORWARD
    | gemma2.AFTER_FEED_FORWARD
    | layers.FINAL,
    rotation="halves",
    embed=layers.embed,
    block=block,
    final_norm=layers.final_norm,
    heads_fill_width=True,
    rope_index=rope_index,
    attention_mask=attention_mask,
    supported_values=layers.SUPPORTED_VALUES
    | {"nextn_predict_layers": (0, "a block that predicts further tokens")},
    unsupported_names={"exaone-moe": "a mixture of experts"},
)
