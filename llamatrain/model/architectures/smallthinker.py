"""SmallThinker (Song et al. 2025): mixtures of experts with gates of relu, chosen before a block's attention.

The router scores what enters the block, without a norm. In the larger model, three of four blocks have a window, and the
first of each four sees all keys and rotates nothing. The smaller model has no windows, and rotates all heads.
"""

from llamatrain.graph import ops as O
from llamatrain.graph.ops import reglu
from llamatrain.graph.tensor import Tensor
from llamatrain.model import experts, layers
from llamatrain.model.architecture import Architecture, AttentionMask, Key
from llamatrain.model.forward import ForwardPass
from llamatrain.model.hyperparameters import Hyperparameters

PERIOD = 4  # of blocks, the first of which has no window
WINDOW = 4096  # llama.cpp takes it for any window that a file names, as both models have no other
KEYS = {"attention.sliding_window": Key("window", int, 0)}


def attention_mask(h: Hyperparameters, layer: int) -> AttentionMask:
    """Return a block's mask."""
    windowed = h.extra["window"] and layer % PERIOD
    return AttentionMask(scale=h.head_size**-0.5, window=WINDOW if windowed else 0)


def rope_index(h: Hyperparameters, layer: int) -> int | None:
    """Return 0, the only rotation, or None for blocks without one."""
    has_unrotated = h.extra["window"] and h.layers != PERIOD  # llama.cpp rotates all of so few
    return None if has_unrotated and layer % PERIOD == 0 else 0


def block(model: ForwardPass, layer: int, x: Tensor) -> Tensor:
    """Return the output of a block whose router sees the input of attention."""
    prefix = f"blk.{layer}"
    attended = layers.attention(model, layer, model.norm(x, f"{prefix}.attn_norm"))
    scored = model.keep_scored_rows(layer, x)
    x = O.add(scored, attended)
    routing = experts.gating_of(model.h, normalized=True)
    y = model.norm(x, f"{prefix}.ffn_norm")
    return O.add(x, experts.feed_forward(model, layer, y, reglu, routing, scored))


ARCHITECTURE = Architecture(
    name="smallthinker",
    keys=experts.KEYS | layers.KEYS | experts.FEED_FORWARD_LENGTH | experts.SIGMOID_KEYS | KEYS,
    weights=layers.EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | layers.ATTENTION
    | layers.BEFORE_FEED_FORWARD
    | experts.router("block_sparse_moe.primary_router", is_linear=True)
    | experts.stacks(experts.count("expert_ff"), "block_sparse_moe.experts")
    | layers.FINAL,
    rotation="halves",
    embed=layers.embed,
    block=block,
    final_norm=layers.final_norm,
    attention_mask=attention_mask,
    rope_index=rope_index,
    check=experts.check,
    new_model_values=experts.NEW_MODEL_VALUES,
    supported_values=layers.CAUSAL,
)
