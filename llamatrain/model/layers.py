"""What most architectures have alike: the keys of their numbers, their weights, and the two halves of a block.

A kind of weight that only some have stands in their own file; what is said here of one has the name that GGUF gives it.
"""

from collections.abc import Callable

from llamatrain.graph import ops as O
from llamatrain.graph.ops import swiglu
from llamatrain.graph.tensor import Tensor
from llamatrain.model.architecture import Key, Refused, Role, WeightKind
from llamatrain.model.forward import ForwardPass
from llamatrain.model.hyperparameters import Hyperparameters

Weight = WeightKind[Hyperparameters]
Numbers = Callable[[Hyperparameters], int]

KEYS = {
    "context_length": Key("ctx", int, 2048),
    "embedding_length": Key("embd"),
    "block_count": Key("layers"),
    "feed_forward_length": Key("ff"),
    "attention.head_count": Key("heads"),
    "attention.head_count_kv": Key("kv_heads", int, lambda known: known["heads"]),
    "attention.key_length": Key("head_size", int, lambda known: known["embd"] // max(1, known["heads"])),
    "attention.value_length": Key("head_size"),
    "attention.layer_norm_rms_epsilon": Key("rms_eps", float, 1e-5),
}
REFUSED: dict[str, Refused] = {
    "expert_count": (0, "a mixture of experts"),
    "attention.causal": (True, "attention to what comes later"),
}


# ---- weights ---------------------------------------------------------------


def matrix(
    out: Numbers, into: Numbers, module: str, rotated: Numbers | None = None, residual: bool = False
) -> Weight:
    """Of a block."""
    return WeightKind(
        role="matrix",
        shape=lambda h: (out(h), into(h)),
        module=f"model.layers.{{}}.{module}",
        rotated=rotated,
        residual=residual,
    )


def row(role: Role, size: Numbers, module: str, optional: bool = False) -> Weight:
    """A norm's or a bias, of a block."""
    return WeightKind(
        role=role, shape=lambda h: (size(h),), module=f"model.layers.{{}}.{module}", optional=optional
    )


def norm(module: str) -> Weight:
    return row("norm", lambda h: h.embd, module)


EMBEDDINGS: dict[str, Weight] = {
    "token_embd.weight": WeightKind(
        role="embedding", shape=lambda h: (h.vocab, h.embd), module="model.embed_tokens"
    )
}
ATTENTION = {
    "blk.{}.attn_q.weight": matrix(
        lambda h: h.width, lambda h: h.embd, "self_attn.q_proj", rotated=lambda h: h.heads
    ),
    "blk.{}.attn_k.weight": matrix(
        lambda h: h.kv_width, lambda h: h.embd, "self_attn.k_proj", rotated=lambda h: h.kv_heads
    ),
    "blk.{}.attn_v.weight": matrix(lambda h: h.kv_width, lambda h: h.embd, "self_attn.v_proj"),
    "blk.{}.attn_output.weight": matrix(
        lambda h: h.embd, lambda h: h.width, "self_attn.o_proj", residual=True
    ),
}
BIASES = {  # behind queries, keys and values, which any may have
    "blk.{}.attn_q.bias": row("bias", lambda h: h.width, "self_attn.q_proj", optional=True),
    "blk.{}.attn_k.bias": row("bias", lambda h: h.kv_width, "self_attn.k_proj", optional=True),
    "blk.{}.attn_v.bias": row("bias", lambda h: h.kv_width, "self_attn.v_proj", optional=True),
}
MORE_BIASES = {
    "blk.{}.attn_output.bias": row("bias", lambda h: h.embd, "self_attn.o_proj", optional=True),
    "blk.{}.ffn_gate.bias": row("bias", lambda h: h.ff, "mlp.gate_proj", optional=True),
    "blk.{}.ffn_up.bias": row("bias", lambda h: h.ff, "mlp.up_proj", optional=True),
    "blk.{}.ffn_down.bias": row("bias", lambda h: h.embd, "mlp.down_proj", optional=True),
}
HEAD_NORMS = {
    "blk.{}.attn_q_norm.weight": row("norm", lambda h: h.head_size, "self_attn.q_norm"),
    "blk.{}.attn_k_norm.weight": row("norm", lambda h: h.head_size, "self_attn.k_norm"),
}
FEED_FORWARD = {
    "blk.{}.ffn_gate.weight": matrix(lambda h: h.ff, lambda h: h.embd, "mlp.gate_proj"),
    "blk.{}.ffn_up.weight": matrix(lambda h: h.ff, lambda h: h.embd, "mlp.up_proj"),
    "blk.{}.ffn_down.weight": matrix(lambda h: h.embd, lambda h: h.ff, "mlp.down_proj", residual=True),
}
LAST: dict[str, Weight] = {
    "output_norm.weight": WeightKind(role="norm", shape=lambda h: (h.embd,), module="model.norm"),
    "output.weight": WeightKind(role="output", shape=lambda h: (h.vocab, h.embd), module="lm_head"),
}
BEFORE_ATTENTION = {"blk.{}.attn_norm.weight": norm("input_layernorm")}
BEFORE_FEED_FORWARD = {"blk.{}.ffn_norm.weight": norm("post_attention_layernorm")}
WEIGHTS = EMBEDDINGS | BEFORE_ATTENTION | ATTENTION | BIASES | BEFORE_FEED_FORWARD | FEED_FORWARD | LAST


# ---- blocks ----------------------------------------------------------------


def embed(model: ForwardPass) -> Tensor:
    return model.embedding("token_embd")


def attention(model: ForwardPass, layer: int, y: Tensor, normed: bool = False) -> Tensor:
    """Of queries, keys and values that are made of y; each head of queries and keys `normed`, or as it is."""
    h, at = model.h, f"blk.{layer}"

    def turned(name: str, count: int) -> Tensor:
        heads = model.heads(model.linear(y, f"{at}.{name}"), count)
        return model.rotated(layer, model.norm(heads, f"{at}.{name}_norm") if normed else heads)

    q, k = turned("attn_q", h.heads), turned("attn_k", h.kv_heads)
    v = model.heads(model.linear(y, f"{at}.attn_v"), h.kv_heads)
    return model.linear(model.attended(layer, q, k, v), f"{at}.attn_output")


def feed_forward(
    model: ForwardPass, layer: int, y: Tensor, gated: Callable[[Tensor, Tensor], Tensor] = swiglu
) -> Tensor:
    at = f"blk.{layer}"
    return model.linear(
        gated(model.linear(y, f"{at}.ffn_gate"), model.linear(y, f"{at}.ffn_up")), f"{at}.ffn_down"
    )


def block(model: ForwardPass, layer: int, x: Tensor, normed: bool = False) -> Tensor:
    """Each half reads what is normed, and adds to what is not."""
    at = f"blk.{layer}"
    made = attention(model, layer, model.norm(x, f"{at}.attn_norm"), normed)
    x = O.add(model.going_on(layer, x), made)
    return O.add(x, feed_forward(model, layer, model.norm(x, f"{at}.ffn_norm")))


def last(model: ForwardPass, x: Tensor) -> Tensor:
    return model.norm(x, "output_norm")
