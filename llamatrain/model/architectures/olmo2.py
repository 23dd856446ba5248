"""OLMo 2 and 3: norms behind attention and feed-forward, and of queries and keys whole (OLMo Team 2024); 3 has windows."""

from collections.abc import Sequence

from llamatrain.graph import ops as O
from llamatrain.graph.tensor import Tensor
from llamatrain.model import layers
from llamatrain.model.architecture import Architecture, AttentionMask, Key, WindowPattern, windowed
from llamatrain.model.forward import ForwardPass
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.rope import Rope

KEYS = {
    "attention.sliding_window": Key("window", int, 0),
    "attention.sliding_window_pattern": WindowPattern("period", int, 4),
}
NORMS = {
    "blk.{}.attn_q_norm.weight": layers.row("norm", lambda h: h.width, "self_attn.q_norm"),
    "blk.{}.attn_k_norm.weight": layers.row("norm", lambda h: h.kv_width, "self_attn.k_norm"),
    "blk.{}.post_attention_norm.weight": layers.norm("post_attention_layernorm"),
}
LAST_NORM = {"blk.{}.post_ffw_norm.weight": layers.norm("post_feedforward_layernorm")}


def block(model: ForwardPass, layer: int, x: Tensor) -> Tensor:
    h, at = model.h, f"blk.{layer}"

    def turned(name: str, count: int) -> Tensor:
        rows = model.norm(model.linear(x, f"{at}.{name}"), f"{at}.{name}_norm")
        return model.rotated(layer, model.heads(rows, count))

    q, k = turned("attn_q", h.heads), turned("attn_k", h.kv_heads)
    v = model.heads(model.linear(x, f"{at}.attn_v"), h.kv_heads)
    made = model.linear(model.attended(layer, q, k, v), f"{at}.attn_output")
    y = O.add(model.going_on(layer, x), model.norm(made, f"{at}.post_attention_norm"))
    return O.add(y, model.norm(layers.feed_forward(model, layer, y), f"{at}.post_ffw_norm"))


def near(h: Hyperparameters, layer: int) -> bool:
    return bool(h.own["window"]) and windowed(int(h.own["period"]), layer)


def sight(h: Hyperparameters, layer: int) -> AttentionMask:
    return AttentionMask(scale=h.head_size**-0.5, window=int(h.own["window"]) if near(h, layer) else 0)


def rotations(h: Hyperparameters) -> Sequence[Rope]:
    """Blocks with windows turn as if nothing were scaled."""
    return [h.rope, Rope(h.rope.size, base=h.rope.base)] if h.own["window"] else [h.rope]


ARCHITECTURE = Architecture(
    name="olmo2",
    keys=layers.KEYS | KEYS,
    weights=layers.EMBEDDINGS
    | layers.ATTENTION
    | layers.BIASES
    | NORMS
    | layers.FEED_FORWARD
    | LAST_NORM
    | layers.LAST,
    rotation="halves",
    embed=layers.embed,
    block=block,
    last=layers.last,
    tied=False,
    narrow=True,
    rotations=rotations,
    turned=lambda h, layer: int(near(h, layer)),
    sight=sight,
    refused=layers.REFUSED,
    relatives={"olmo": "a model with other norms", "olmoe": "a mixture of experts"},
)
