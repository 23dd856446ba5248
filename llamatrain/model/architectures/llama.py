"""Llama 1, 2 and 3, and what is built like them: TinyLlama, Mistral, SmolLM (Touvron et al. 2023)."""

from llamatrain.graph import ops as O
from llamatrain.graph.ops import swiglu
from llamatrain.graph.tensor import Tensor
from llamatrain.model.architecture import Architecture, Key, WeightKind
from llamatrain.model.forward import ForwardPass
from llamatrain.model.hyperparameters import Hyperparameters

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

WEIGHTS: dict[str, WeightKind[Hyperparameters]] = {
    "token_embd.weight": WeightKind(role="embedding", shape=lambda h: (h.vocab, h.embd), module="model.embed_tokens"),
    "blk.{}.attn_norm.weight": WeightKind(role="norm", shape=lambda h: (h.embd,), module="model.layers.{}.input_layernorm"),
    "blk.{}.attn_q.weight": WeightKind(
        role="matrix",
        shape=lambda h: (h.width, h.embd),
        module="model.layers.{}.self_attn.q_proj",
        rotated=lambda h: h.heads,
    ),
    "blk.{}.attn_k.weight": WeightKind(
        role="matrix",
        shape=lambda h: (h.kv_width, h.embd),
        module="model.layers.{}.self_attn.k_proj",
        rotated=lambda h: h.kv_heads,
    ),
    "blk.{}.attn_v.weight": WeightKind(
        role="matrix", shape=lambda h: (h.kv_width, h.embd), module="model.layers.{}.self_attn.v_proj"
    ),
    "blk.{}.attn_output.weight": WeightKind(
        role="matrix", shape=lambda h: (h.embd, h.width), module="model.layers.{}.self_attn.o_proj", residual=True
    ),
    "blk.{}.ffn_norm.weight": WeightKind(
        role="norm", shape=lambda h: (h.embd,), module="model.layers.{}.post_attention_layernorm"
    ),
    "blk.{}.ffn_gate.weight": WeightKind(role="matrix", shape=lambda h: (h.ff, h.embd), module="model.layers.{}.mlp.gate_proj"),
    "blk.{}.ffn_up.weight": WeightKind(role="matrix", shape=lambda h: (h.ff, h.embd), module="model.layers.{}.mlp.up_proj"),
    "blk.{}.ffn_down.weight": WeightKind(
        role="matrix", shape=lambda h: (h.embd, h.ff), module="model.layers.{}.mlp.down_proj", residual=True
    ),
    "output_norm.weight": WeightKind(role="norm", shape=lambda h: (h.embd,), module="model.norm"),
    "output.weight": WeightKind(role="output", shape=lambda h: (h.vocab, h.embd), module="lm_head"),
}


def embed(model: ForwardPass) -> Tensor:
    return model.embedding("token_embd")


def block(model: ForwardPass, layer: int, x: Tensor) -> Tensor:
    h, at = model.h, f"blk.{layer}"
    y = model.norm(x, f"{at}.attn_norm")
    q = model.rotated(model.heads(model.linear(y, f"{at}.attn_q"), h.heads))
    k = model.rotated(model.heads(model.linear(y, f"{at}.attn_k"), h.kv_heads))
    v = model.heads(model.linear(y, f"{at}.attn_v"), h.kv_heads)
    x = O.add(model.going_on(layer, x), model.linear(model.attended(layer, q, k, v), f"{at}.attn_output"))
    y = model.norm(x, f"{at}.ffn_norm")
    gated = swiglu(model.linear(y, f"{at}.ffn_gate"), model.linear(y, f"{at}.ffn_up"))
    return O.add(x, model.linear(gated, f"{at}.ffn_down"))


def last(model: ForwardPass, x: Tensor) -> Tensor:
    return model.norm(x, "output_norm")


ARCHITECTURE = Architecture(
    name="llama",
    keys=KEYS,
    weights=WEIGHTS,
    rotation="pairs",
    embed=embed,
    block=block,
    last=last,
    refused={"expert_count": "a mixture of experts"},
)
