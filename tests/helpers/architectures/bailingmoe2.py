"""Ling 2.0. Its own code is not part of Hugging Face's library: the models there are GLM 4.5 with its names."""

from typing import Any

from tests.helpers.architecture_family import (
    BEFORE,
    ENDS,
    EVEN,
    EXPERTS,
    FORWARD,
    GROUPED,
    ROUTER,
    SCORE_BIAS,
    Family,
    Numbers,
    Row,
    shared_rows,
    three,
)
from tests.helpers.architectures import glm4, glm4moe
from tests.helpers.ling_torch import add_ling

ATTENTION = [
    ("attn_qkv.weight", "attention.query_key_value.weight", "qkv embd"),
    ("attn_output.weight", "attention.dense.weight", "embd width"),
    ("attn_q_norm.weight", "attention.query_layernorm.weight", "head_size"),
    ("attn_k_norm.weight", "attention.key_layernorm.weight", "head_size"),
]
MIXTURE = [*EXPERTS, (SCORE_BIAS, "mlp.gate.expert_bias", "experts"), *shared_rows("mlp.shared_experts")]


def rows(shape: Any, layer: int) -> list[Row]:
    """Return the weights of a block."""
    return [*BEFORE, *ATTENTION, *(FORWARD if layer < shape.dense_blocks else MIXTURE)]


def keys(shape: Any) -> Numbers:
    """Return the metadata."""
    return glm4moe.keys(shape) | {
        "expert_shared_feed_forward_length": shape.expert_ff,
        "vocab_size": shape.vocab,
    }


def settings(shape: Any) -> dict[str, Any]:
    """Return the configuration, with the names of both classes."""
    more = {"num_shared_experts": shape.shared, "score_function": "sigmoid"}
    glm = {"use_qk_norm": True, "num_mtp_layers": 0}
    return glm4moe.group_settings(shape) | glm4.settings(shape) | more | glm


FAMILY = Family(
    block=rows,
    ends=[(ENDS[0][0], "model.word_embeddings.weight", ENDS[0][2]), *ENDS[1:]],
    shapes=three(
        "bailingmoe2",
        GROUPED
        | {"turned": 6, "base": 1e6, "layers": 3, "experts_used": 3, "shared": 2, "scale": 1.5}
        | {"groups": 3, "groups_used": 2},
        {"heads": 4, "kv_heads": 1, "head_size": 10, "embd": 40, "turned": 10, "base": 500.0}
        | {"experts": 5, "experts_used": 3, "expert_ff": 32, "dense_blocks": 0},
        EVEN
        | {"turned": 4, "eps": 1e-3, "experts": 8, "experts_used": 4, "expert_ff": 40, "dense_blocks": 2}
        | {"scale": 2.5, "normalized": False, "groups": 4, "groups_used": 3},
        glm4moe.GroupedShape,
    ),
    config="Glm4MoeConfig",
    model="BailingMoeV2ForCausalLM",
    keys=keys,
    settings=settings,
    without_adapter=(ROUTER,),
    adapts_by_weight=True,
    wide={"expert_ff": 256},
    constants=(SCORE_BIAS,),
    adjust=lambda shape: add_ling(),
)
