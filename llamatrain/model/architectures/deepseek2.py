"""DeepSeek V2 and V3, and models built like them: multi-head latent attention (DeepSeek-AI 2024), and experts.

A block projects each token to a latent, from which the keys and values of all heads are made, and to one key that rotates
and that all heads share. Files have the matrices that make keys and values as two stacks with a matrix for each head, and
older files as one matrix. Keys and values are made as in training while decoding, too: caches hold those of all heads.

Scores are scaled as in llama.cpp, which is as in Hugging Face's models where a file has the key of YaRN's multiplier. The
groups of experts are those of V3; llama.cpp uses them for files of V2 as well.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

from llamatrain.gguf.reader import Gguf
from llamatrain.graph import ops as O
from llamatrain.graph.ops import split_columns
from llamatrain.graph.tensor import Tensor
from llamatrain.model import experts, layers
from llamatrain.model.architecture import Architecture, AttentionMask, Key
from llamatrain.model.architectures import glm4moe
from llamatrain.model.forward import ForwardPass
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.limits import BadHyperparameter
from llamatrain.model.rope import Rope

JOINED = "blk.{}.attn_kv_b.weight"
# GLM 4.7 Flash, whose files do not name its sigmoids
FLASH_LAYERS, FLASH_VOCABULARY = (46, 47), 154880


# ---- numbers in a file ------------------------------------------------------


def is_joined(optional_weights: frozenset[str]) -> bool:
    """Return True if keys and values are made by one matrix."""
    return JOINED in optional_weights


@dataclass(frozen=True)
class HeadLength(Key):
    """The size of a key or a value of a head. Files with one matrix for both have another key for it."""

    def read(self, gguf: Gguf, key: str, known: Mapping[str, Any]) -> Any:
        """Read the size."""
        default = known["embd"] // max(1, known["heads"])
        return gguf.get_value(key, int, 0) or gguf.get_value(key.removesuffix("_mla"), int, default)

    def stored_value(self, values: Mapping[str, Any]) -> Any:
        """Return the size, or 0 if the file does not name it here."""
        return 0 if is_joined(values["optional_weights"]) else values[self.field]


@dataclass(frozen=True, kw_only=True)
class CacheLength(Key):
    """The size of a key or a value in llama.cpp's cache; here it is the larger one, to which the other is padded."""

    joined_value: Callable[[Mapping[str, Any]], int]  # in files with one matrix for keys and values
    split_value: Callable[[Mapping[str, Any]], int]

    def read(self, gguf: Gguf, key: str, known: Mapping[str, Any]) -> Any:
        """Return the size of a head."""
        return max(known["key_length"], known["value_length"])

    def stored_value(self, values: Mapping[str, Any]) -> Any:
        """Return the size in a file."""
        joined = is_joined(values["optional_weights"])
        return self.joined_value(values) if joined else self.split_value(values)


@dataclass(frozen=True)
class CacheHeads(Key):
    """The number of heads in llama.cpp's cache: one if it is of latents. Here, all heads have their own keys and values."""

    def read(self, gguf: Gguf, key: str, known: Mapping[str, Any]) -> Any:
        """Return the number of heads."""
        return known["heads"]

    def stored_value(self, values: Mapping[str, Any]) -> Any:
        """Return the number in a file."""
        return values["heads"] if is_joined(values["optional_weights"]) else 1


def default_gating(known: Mapping[str, Any]) -> int:
    """Return how scores are computed if a file does not say so."""
    sigmoids = known.get("layers") in FLASH_LAYERS and known.get("vocab") == FLASH_VOCABULARY
    return 2 if sigmoids else 1


HEAD_KEYS = {
    "attention.key_length_mla": HeadLength("key_length", int, 0, min_value=2),
    "attention.value_length_mla": HeadLength("value_length", int, 0, min_value=1),
    "attention.kv_lora_rank": Key("kv_rank", int, min_value=1),
    # 0: queries are projected at once; llama.cpp may require the key
    "attention.q_lora_rank": Key("q_rank", int, lambda known: 0),
    "attention.head_count_kv": CacheHeads("kv_heads"),
    "attention.key_length": CacheLength(
        "head_size",
        joined_value=itemgetter("key_length"),
        split_value=lambda values: values["kv_rank"] + values["rope"].size,
    ),
    "attention.value_length": CacheLength(
        "head_size", joined_value=itemgetter("value_length"), split_value=itemgetter("kv_rank")
    ),
    # a tenth of the multiplier
    "rope.scaling.yarn_log_multiplier": Key("yarn_log_multiplier", float, 0.0),
}
KEYS = (
    {key: each for key, each in layers.KEYS.items() if key not in HEAD_KEYS}
    | layers.BLOCK_KEYS
    | HEAD_KEYS
    | experts.DENSE_KEYS
    | experts.SHARED_COUNT_KEYS
    | {"expert_gating_func": Key("gating", int, default_gating)}
    | experts.ROUTING_KEYS
)


def check(h: Hyperparameters) -> None:
    """Raise BadHyperparameter if the sizes of heads or the numbers of experts do not fit together."""
    experts.check(h)
    key, value = int(h.extra["key_length"]), int(h.extra["value_length"])
    if h.kv_heads != h.heads:
        raise BadHyperparameter("kv_heads", f"{h.kv_heads}", f"must be the {h.heads} heads")
    if h.head_size != max(key, value):
        raise BadHyperparameter("head_size", f"{h.head_size}", f"must be the larger of {key} and {value}")
    if h.rope.size >= key:
        raise BadHyperparameter("size", f"{h.rope.size}", f"must be less than the size of a key, {key}")
    if h.rope.kind not in ("none", "yarn"):
        raise BadHyperparameter("kind", h.rope.kind, "must be none or yarn")


def growth(h: Hyperparameters, multiplier: float) -> float:
    """Return how much longer YaRN makes vectors."""
    return 1.0 + 0.1 * multiplier * math.log(max(h.rope.factor, 1.0)) if h.rope.kind == "yarn" else 1.0


def ropes(h: Hyperparameters) -> Sequence[Rope]:
    """Return the rotation. If a file has YaRN's multiplier, rotated vectors are not longer, but scores larger."""
    if not h.extra["yarn_log_multiplier"]:
        return [h.rope]
    return [replace(h.rope, length=h.rope.length / growth(h, 1.0))]


def attention_mask(h: Hyperparameters, layer: int) -> AttentionMask:
    """Return the mask of a block; all scores grow, those without rotation, too."""
    multiplier = h.extra["yarn_log_multiplier"] / 0.1
    length = h.rope.length * growth(h, multiplier or 1.0)
    return AttentionMask(scale=length**2 / math.sqrt(h.extra["key_length"]))


# ---- weights ----------------------------------------------------------------


def still_length(h: Hyperparameters) -> int:
    """Return the size of the part of a key that does not rotate."""
    return int(h.extra["key_length"]) - h.rope.size


def all_queries(h: Hyperparameters) -> int:
    """Return the width of the queries of all heads."""
    return h.heads * int(h.extra["key_length"])


def all_values(h: Hyperparameters) -> int:
    """Return the width of the values of all heads."""
    return h.heads * int(h.extra["value_length"])


def has_q_latent(h: Hyperparameters, layer: int) -> bool:
    """Return True if queries are made from a latent of their own."""
    return h.extra["q_rank"] > 0


def has_plain_q(h: Hyperparameters, layer: int) -> bool:
    """Return True if queries are projected at once."""
    return not has_q_latent(h, layer)


def is_split(h: Hyperparameters, layer: int) -> bool:
    """Return True if keys and values are made by two stacks."""
    return not is_joined(h.optional_weights)


# llama.cpp applies no adapters to projections of queries, keys and values of this model
projection = partial(layers.block_matrix, default_target=False)
KV_RANK, Q_RANK = experts.count("kv_rank"), experts.count("q_rank")
Q_LATENT: dict[str, layers.Weight] = {
    "blk.{}.attn_q_a.weight": projection(Q_RANK, experts.width, "self_attn.q_a_proj"),
    "blk.{}.attn_q_a_norm.weight": layers.block_vector("norm", Q_RANK, "self_attn.q_a_layernorm"),
    "blk.{}.attn_q_b.weight": projection(all_queries, Q_RANK, "self_attn.q_b_proj"),
}
PLAIN_Q: dict[str, layers.Weight] = {
    "blk.{}.attn_q.weight": projection(all_queries, experts.width, "self_attn.q_proj"),
}
STACKS: dict[str, layers.Weight] = {  # a matrix for each head, of keys the other way round
    "blk.{}.attn_k_b.weight": layers.block_weight(
        "stack", lambda h: (h.heads, KV_RANK(h), still_length(h)), "self_attn.kv_b_proj"
    ),
    "blk.{}.attn_v_b.weight": layers.block_weight(
        "stack", lambda h: (h.heads, int(h.extra["value_length"]), KV_RANK(h)), "self_attn.kv_b_proj"
    ),
}
ATTENTION: dict[str, layers.Weight] = (
    layers.restrict_blocks(PLAIN_Q, has_plain_q)
    | layers.restrict_blocks(Q_LATENT, has_q_latent)
    | {
        "blk.{}.attn_kv_a_mqa.weight": projection(
            lambda h: KV_RANK(h) + h.rope.size, experts.width, "self_attn.kv_a_proj_with_mqa"
        ),
        "blk.{}.attn_kv_a_norm.weight": layers.block_vector("norm", KV_RANK, "self_attn.kv_a_layernorm"),
        JOINED: projection(
            lambda h: h.heads * still_length(h) + all_values(h), KV_RANK, "self_attn.kv_b_proj", optional=True
        ),
    }
    | layers.restrict_blocks(STACKS, is_split)
    | {
        "blk.{}.attn_output.weight": layers.block_matrix(
            experts.width, all_values, "self_attn.o_proj", residual=True
        )
    }
)


# ---- blocks -----------------------------------------------------------------


def queries(model: ForwardPass, layer: int, y: Tensor) -> Tensor:
    """Return the heads of queries, of which the part that rotates comes first."""
    h, prefix = model.h, f"blk.{layer}"
    if has_q_latent(h, layer):
        y = model.norm(model.linear(y, f"{prefix}.attn_q_a"), f"{prefix}.attn_q_a_norm")
    heads = model.split_heads(
        model.linear(y, f"{prefix}.attn_q{'_b' if has_q_latent(h, layer) else ''}"), h.heads
    )
    still, turned = split_columns(heads, sizes=(still_length(h), h.rope.size))
    return O.join_columns(model.apply_rope(layer, turned), still)


def keys_and_values(model: ForwardPass, layer: int, latent: Tensor) -> tuple[Tensor, Tensor]:
    """Return the parts of keys that do not rotate, and values, made from latents."""
    h, prefix = model.h, f"blk.{layer}"
    if is_joined(h.optional_weights):
        both = model.split_heads(model.linear(latent, f"{prefix}.attn_kv_b"), h.heads)
        keys, values = split_columns(both, sizes=(still_length(h), int(h.extra["value_length"])))
        return keys, values

    def multiply(stack: Tensor) -> Tensor:
        rows = O.reshape(stack, shape=(stack.size // latent.shape[-1], latent.shape[-1]))
        return model.split_heads(O.matmul(latent, rows), h.heads)

    keys = O.cont(O.transpose(model.weights[f"{prefix}.attn_k_b.weight"]))
    return multiply(keys), multiply(model.weights[f"{prefix}.attn_v_b.weight"])


def pad_heads(x: Tensor, size: int) -> Tensor:
    """Return heads with zeros behind them up to a size."""
    if x.shape[-1] == size:
        return x
    return O.join_columns(x, O.fill(shape=(*x.shape[:-1], size - x.shape[-1]), value=0.0, dtype=x.dtype))


def attention(model: ForwardPass, layer: int, y: Tensor) -> Tensor:
    """Return the attention of a block: its keys and values are made from latents of y."""
    h, prefix = model.h, f"blk.{layer}"
    latent, turned = split_columns(
        model.linear(y, f"{prefix}.attn_kv_a_mqa"), sizes=(KV_RANK(h), h.rope.size)
    )
    turned = model.apply_rope(layer, model.split_heads(turned, 1))
    turned = O.repeat(turned, shape=(*model.tokens.shape, h.heads, h.rope.size))
    still, v = keys_and_values(model, layer, model.norm(latent, f"{prefix}.attn_kv_a_norm"))
    heads = (queries(model, layer, y), O.join_columns(turned, still), v)
    attended = model.attend(layer, *(pad_heads(each, h.head_size) for each in heads))
    if padding := h.head_size - v.shape[-1]:
        attended, _ = split_columns(attended, sizes=(v.shape[-1], padding))
    rows = O.reshape(attended, shape=(model.tokens.size, all_values(h)))
    return model.linear(model.keep_scored_rows(layer, rows), f"{prefix}.attn_output")


def block(model: ForwardPass, layer: int, x: Tensor) -> Tensor:
    """Return the output of a pre-norm block."""
    prefix = f"blk.{layer}"
    output = attention(model, layer, model.norm(x, f"{prefix}.attn_norm"))
    x = O.add(model.keep_scored_rows(layer, x), output)
    return O.add(x, glm4moe.feed_forward(model, layer, model.norm(x, f"{prefix}.ffn_norm")))


def new_rope(rope: Rope) -> Rope:
    """Return the rotation of a new model, of half of each key."""
    return replace(rope, size=max(2, rope.size // 4 * 2))


ARCHITECTURE = Architecture(
    name="deepseek2",
    keys=experts.KEYS | KEYS,
    weights=layers.EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | ATTENTION
    | layers.BEFORE_FEED_FORWARD
    | layers.restrict_blocks(layers.FEED_FORWARD, experts.is_dense)
    | layers.restrict_blocks(glm4moe.MIXTURE, experts.is_mixture)
    | glm4moe.SHARED
    | layers.FINAL,
    rotation="pairs",
    embed=layers.embed,
    block=block,
    final_norm=layers.final_norm,
    partial_rotary=True,
    ropes=ropes,
    attention_mask=attention_mask,
    is_kept=layers.is_extra,
    check=check,
    new_model_values=glm4moe.NEW_MODEL_VALUES
    | {
        "key_length": itemgetter("head_size"),
        "value_length": itemgetter("head_size"),
        "kv_rank": lambda sizes: max(1, sizes["embd"] // 4),
        "gating": 2,
    },
    new_model_rope=new_rope,
    new_model_weights=frozenset({experts.SCORE_BIAS}),
    supported_values=layers.CAUSAL
    | {"attention.temperature_scale": (0.0, "a scale that grows with positions")},
)
