"""Parts that most architectures share: metadata keys, weights, and the two halves of a block.

Weights that only some architectures have are in their own files. Weights here have their GGUF names.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from llamatrain.errors import FileError
from llamatrain.gguf.reader import Gguf
from llamatrain.graph import ops as O
from llamatrain.graph.ops import relu_sqr, split_columns, swiglu
from llamatrain.graph.tensor import Tensor
from llamatrain.model.architecture import Key, Role, Shape, SupportedValue, WeightKind
from llamatrain.model.forward import ForwardPass
from llamatrain.model.hyperparameters import Hyperparameters

Weight = WeightKind[Hyperparameters]
Size = Callable[[Hyperparameters], int]
Norm = Callable[[ForwardPass, Tensor, str], Tensor]  # of rows, with the weight of a name
FeedForward = Callable[[ForwardPass, int, Tensor], Tensor]  # of a block's number and normed rows
EXTRA_BLOCKS = "nextn_predict_layers"


@dataclass(frozen=True)
class BlockCount(Key):
    """The number of blocks without those that predict several tokens, which a file counts, too."""

    def read(self, gguf: Gguf, key: str, known: Mapping[str, Any]) -> Any:
        """Read the number of blocks."""
        extra = gguf.get_value(f"{key.partition('.')[0]}.{EXTRA_BLOCKS}", int, 0)
        count = super().read(gguf, key, known)
        if not 0 <= extra < count:
            raise FileError(
                f"{gguf.path}: {EXTRA_BLOCKS} must be less than the {count} blocks (got {extra})",
                code="invalid-hyperparameter",
            )
        return count - extra

    def stored_value(self, values: Mapping[str, Any]) -> Any:
        """Return the number that a file has."""
        return values["layers"] + values["extra_blocks"]


KEYS = {
    "context_length": Key("ctx", int, 2048),
    "embedding_length": Key("embd"),
    "block_count": Key("layers"),
    "feed_forward_length": Key("ff", by_block=True),
    "attention.head_count": Key("heads", by_block=True),
    "attention.head_count_kv": Key("kv_heads", int, lambda known: known["heads"], by_block=True),
    "attention.key_length": Key("head_size", int, lambda known: known["embd"] // max(1, known["heads"])),
    "attention.value_length": Key("head_size"),
    "attention.layer_norm_rms_epsilon": Key("rms_eps", float, 1e-5),
}
# of models with blocks that predict several tokens, behind the others
BLOCK_KEYS = {"block_count": BlockCount("layers"), EXTRA_BLOCKS: Key("extra_blocks", int, 0)}
LAYER_NORM_KEYS = {key: each for key, each in KEYS.items() if each.field != "rms_eps"} | {
    "attention.layer_norm_epsilon": Key("rms_eps", float, 1e-5)
}
CAUSAL: dict[str, SupportedValue] = {"attention.causal": (True, "attention to what comes later")}
SUPPORTED_VALUES = {"expert_count": (0, "a mixture of experts")} | CAUSAL  # of models without experts


# ---- weights ---------------------------------------------------------------


def block_matrix(
    out: Size, into: Size, module: str, rotated: Size | None = None, residual: bool = False, **facts: Any
) -> Weight:
    """Return a matrix of a block."""
    return block_weight(
        "matrix", lambda h: (out(h), into(h)), module, rotary_heads=rotated, residual=residual, **facts
    )


def block_weight(role: Role, shape: Callable[[Hyperparameters], Shape], module: str, **facts: Any) -> Weight:
    """Return a weight of a block."""
    return WeightKind(role=role, shape=shape, module=f"model.layers.{{}}.{module}", **facts)


def block_vector(role: Role, size: Size, module: str, **facts: Any) -> Weight:
    """Return a norm or bias of a block."""
    return block_weight(role, lambda h: (size(h),), module, **facts)


def block_taps(channels: Size, module: str, **facts: Any) -> Weight:
    """Return the taps of a block's convolution; their number is the hyperparameter `taps`."""
    return block_weight("taps", lambda h: (channels(h), int(h.extra["taps"])), module, **facts)


def block_norm(module: str) -> Weight:
    """Return a norm of a block, as wide as the model."""
    return block_vector("norm", lambda h: h.embd, module)


def norm_bias(module: str) -> Weight:
    """Return the bias of a layer norm."""
    return block_vector("bias", lambda h: h.embd, module)


def rename_modules(weights: dict[str, Weight], modules: Mapping[str, str]) -> dict[str, Weight]:
    """Return weights of blocks with other module names, by short names such as ffn_up."""
    return {
        name: replace(kind, module=f"model.layers.{{}}.{modules[short]}")
        if (short := name.split(".")[2]) in modules
        else kind
        for name, kind in weights.items()
    }


def restrict_blocks(
    weights: dict[str, Weight], present: Callable[[Hyperparameters, int], bool]
) -> dict[str, Weight]:
    """Return weights that only some blocks have."""
    return {name: replace(kind, present=present) for name, kind in weights.items()}


EMBEDDINGS: dict[str, Weight] = {
    "token_embd.weight": WeightKind(
        role="embedding", shape=lambda h: (h.vocab, h.embd), module="model.embed_tokens"
    )
}
ATTENTION = {
    "blk.{}.attn_q.weight": block_matrix(
        lambda h: h.width, lambda h: h.embd, "self_attn.q_proj", rotated=lambda h: h.heads
    ),
    "blk.{}.attn_k.weight": block_matrix(
        lambda h: h.kv_width, lambda h: h.embd, "self_attn.k_proj", rotated=lambda h: h.kv_heads
    ),
    "blk.{}.attn_v.weight": block_matrix(lambda h: h.kv_width, lambda h: h.embd, "self_attn.v_proj"),
    "blk.{}.attn_output.weight": block_matrix(
        lambda h: h.embd, lambda h: h.width, "self_attn.o_proj", residual=True
    ),
}
JOINED_ATTENTION = {  # with one matrix for queries, keys and values
    "blk.{}.attn_qkv.weight": block_matrix(
        lambda h: h.width + 2 * h.kv_width, lambda h: h.embd, "self_attn.qkv_proj"
    ),
    "blk.{}.attn_output.weight": ATTENTION["blk.{}.attn_output.weight"],
}
BIASES = {  # of queries, keys and values; optional in all architectures
    "blk.{}.attn_q.bias": block_vector("bias", lambda h: h.width, "self_attn.q_proj", optional=True),
    "blk.{}.attn_k.bias": block_vector("bias", lambda h: h.kv_width, "self_attn.k_proj", optional=True),
    "blk.{}.attn_v.bias": block_vector("bias", lambda h: h.kv_width, "self_attn.v_proj", optional=True),
}
MORE_BIASES = {
    "blk.{}.attn_output.bias": block_vector("bias", lambda h: h.embd, "self_attn.o_proj", optional=True),
    "blk.{}.ffn_gate.bias": block_vector("bias", lambda h: h.ff, "mlp.gate_proj", optional=True),
    "blk.{}.ffn_up.bias": block_vector("bias", lambda h: h.ff, "mlp.up_proj", optional=True),
    "blk.{}.ffn_down.bias": block_vector("bias", lambda h: h.embd, "mlp.down_proj", optional=True),
}
HEAD_NORMS: dict[str, Weight] = {
    "blk.{}.attn_q_norm.weight": block_vector("norm", lambda h: h.head_size, "self_attn.q_norm"),
    "blk.{}.attn_k_norm.weight": block_vector("norm", lambda h: h.head_size, "self_attn.k_norm"),
}
NORMS_OF_EACH_HEAD: dict[str, Weight] = {  # a row for each head; only some models have them
    "blk.{}.attn_q_norm.weight": WeightKind(
        role="norm",
        shape=lambda h: (h.heads, h.head_size),
        module="model.layers.{}.self_attn.q_norm",
        optional=True,
    ),
    "blk.{}.attn_k_norm.weight": WeightKind(
        role="norm",
        shape=lambda h: (h.kv_heads, h.head_size),
        module="model.layers.{}.self_attn.k_norm",
        optional=True,
    ),
}
FEED_FORWARD = {
    "blk.{}.ffn_gate.weight": block_matrix(lambda h: h.ff, lambda h: h.embd, "mlp.gate_proj"),
    "blk.{}.ffn_up.weight": block_matrix(lambda h: h.ff, lambda h: h.embd, "mlp.up_proj"),
    "blk.{}.ffn_down.weight": block_matrix(lambda h: h.embd, lambda h: h.ff, "mlp.down_proj", residual=True),
}
OUTPUT_BIAS = {"blk.{}.attn_output.bias": MORE_BIASES["blk.{}.attn_output.bias"]}
UNGATED = {name: FEED_FORWARD[name] for name in ("blk.{}.ffn_up.weight", "blk.{}.ffn_down.weight")}
UNGATED_BIASES = {name: MORE_BIASES[name] for name in ("blk.{}.ffn_up.bias", "blk.{}.ffn_down.bias")}
FINAL: dict[str, Weight] = {
    "output_norm.weight": WeightKind(role="norm", shape=lambda h: (h.embd,), module="model.norm"),
    "output.weight": WeightKind(role="output", shape=lambda h: (h.vocab, h.embd), module="lm_head"),
}
FINAL_WITH_BIAS = {
    "output_norm.weight": FINAL["output_norm.weight"],
    "output_norm.bias": WeightKind(role="bias", shape=lambda h: (h.embd,), module="model.norm"),
    "output.weight": FINAL["output.weight"],
}
BEFORE_ATTENTION = {"blk.{}.attn_norm.weight": block_norm("input_layernorm")}
BEFORE_FEED_FORWARD = {"blk.{}.ffn_norm.weight": block_norm("post_attention_layernorm")}
# the same norm by the name that some architectures have for it
POST_ATTENTION_NORM = {"blk.{}.post_attention_norm.weight": block_norm("post_attention_layernorm")}
BEFORE_ATTENTION_BIAS = {"blk.{}.attn_norm.bias": norm_bias("input_layernorm")}
BEFORE_FEED_FORWARD_BIAS = {"blk.{}.ffn_norm.bias": norm_bias("post_attention_layernorm")}
WEIGHTS = EMBEDDINGS | BEFORE_ATTENTION | ATTENTION | BIASES | BEFORE_FEED_FORWARD | FEED_FORWARD | FINAL


# ---- blocks ----------------------------------------------------------------


def embed(model: ForwardPass) -> Tensor:
    """Return the token embeddings."""
    return model.embedding("token_embd")


def attention(model: ForwardPass, layer: int, y: Tensor, norm_heads: Norm | None = None) -> Tensor:
    """Return the attention of queries, keys and values projected from y.

    With `norm_heads`, the heads of queries and keys are normed first.
    """

    def rotate(heads: Tensor, name: str) -> Tensor:
        return model.apply_rope(
            layer, norm_heads(model, heads, f"blk.{layer}.{name}_norm") if norm_heads else heads
        )

    return attend(model, layer, y, rotate)


def norm_each_head(model: ForwardPass, heads: Tensor, name: str) -> Tensor:
    """Return the layer norms of heads, each with its own weight; the heads as they are if the model norms none."""
    return model.layer_norm_each_head(heads, name) if f"{name}.weight" in model.weights else heads


def attend(model: ForwardPass, layer: int, y: Tensor, rotate: Callable[[Tensor, str], Tensor]) -> Tensor:
    """Return the attention of queries, keys and values projected from y, by three matrices or by one.

    `rotate` takes the heads of attn_q or attn_k, and this name.
    """
    h, prefix = model.h.for_block(layer), f"blk.{layer}"
    parts: dict[str, Tensor] = {}
    if f"{prefix}.attn_qkv.weight" in model.weights:
        sizes = h.width, h.kv_width, h.kv_width
        joined = split_columns(model.linear(y, f"{prefix}.attn_qkv"), sizes=sizes)
        parts = dict(zip(("attn_q", "attn_k", "attn_v"), joined, strict=True))

    def project(name: str, count: int) -> Tensor:
        return model.split_heads(parts[name] if parts else model.linear(y, f"{prefix}.{name}"), count)

    q, k = rotate(project("attn_q", h.heads), "attn_q"), rotate(project("attn_k", h.kv_heads), "attn_k")
    attended = model.attention(layer, q, k, project("attn_v", h.kv_heads))
    return model.linear(attended, f"{prefix}.attn_output")


def feed_forward(
    model: ForwardPass,
    layer: int,
    y: Tensor,
    gate: Callable[[Tensor, Tensor], Tensor] = swiglu,
    suffix: str = "",
) -> Tensor:
    """Return down(gate(gate(y), up(y))), with weights whose names end with a suffix."""

    def multiply(x: Tensor, name: str) -> Tensor:
        return model.linear(x, f"blk.{layer}.{name}{suffix}")

    return multiply(gate(multiply(y, "ffn_gate"), multiply(y, "ffn_up")), "ffn_down")


def ungated(
    model: ForwardPass, layer: int, y: Tensor, activation: Callable[[Tensor], Tensor] = relu_sqr
) -> Tensor:
    """Return down(activation(up(y)))."""
    return model.linear(activation(model.linear(y, f"blk.{layer}.ffn_up")), f"blk.{layer}.ffn_down")


def block(
    model: ForwardPass,
    layer: int,
    x: Tensor,
    norm_heads: Norm | None = None,
    *,
    norm: Norm = ForwardPass.norm,
    ffn_norm: str = "ffn_norm",
    transform: FeedForward = feed_forward,
) -> Tensor:
    """Return the output of a pre-norm block: attention and feed-forward, each added to its input."""
    prefix = f"blk.{layer}"
    output = attention(model, layer, norm(model, x, f"{prefix}.attn_norm"), norm_heads)
    x = O.add(model.keep_scored_rows(layer, x), output)
    return O.add(x, transform(model, layer, norm(model, x, f"{prefix}.{ffn_norm}")))


def parallel_block(
    model: ForwardPass,
    layer: int,
    x: Tensor,
    norm_heads: Norm | None = None,
    *,
    norm: Norm = ForwardPass.norm,
    transform: FeedForward = feed_forward,
) -> Tensor:
    """Return the output of a block whose attention and feed-forward share one norm, and are added to its input."""
    y = norm(model, x, f"blk.{layer}.attn_norm")
    x = O.add(model.keep_scored_rows(layer, x), attention(model, layer, y, norm_heads))
    return O.add(x, transform(model, layer, model.keep_scored_rows(layer, y)))


def final_norm(model: ForwardPass, x: Tensor, norm: Norm = ForwardPass.norm) -> Tensor:
    """Return the norm before the output weight."""
    return norm(model, x, "output_norm")


def is_extra(h: Hyperparameters, layer: int) -> bool:
    """Return True if a block predicts several tokens: it belongs to the file, and is not used."""
    return layer >= h.layers
