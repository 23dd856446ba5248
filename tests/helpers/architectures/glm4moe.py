"""GLM 4.5."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.helpers.architecture_family import (
    ATTENTION,
    BIASES,
    EXPERTS,
    FORWARD,
    GROUPED,
    HEAD_NORMS,
    ROUTER,
    SCORE_BIAS,
    DenseAndSharedShape,
    Family,
    Numbers,
    Row,
    expert_keys,
    expert_settings,
    key_and_value_length,
    shared_rows,
    three,
)
from tests.helpers.architectures import glm4


@dataclass(frozen=True, kw_only=True)
class GroupedShape(DenseAndSharedShape):
    """The sizes of a model whose experts may be chosen of some groups."""

    groups: int = 1
    groups_used: int = 1
    scale: float = 1.0
    normalized: bool = True


@dataclass(frozen=True, kw_only=True)
class HeadShape(GroupedShape):
    """The sizes of a model that may norm heads and have biases."""

    norms: bool = True
    biases: bool = True


BIAS = (SCORE_BIAS, "mlp.gate.e_score_correction_bias", "experts")
NORMS = [
    ("attn_norm.weight", "input_layernorm.weight", "embd"),
    ("post_attention_norm.weight", "post_attention_layernorm.weight", "embd"),
]
MIXTURE = [*EXPERTS, BIAS, *shared_rows("mlp.shared_experts")]


def rows(shape: Any, layer: int) -> Sequence[Row]:
    """Return the weights of a block."""
    more = [*(BIASES if shape.biases else ()), *(HEAD_NORMS if shape.norms else ())]
    return [*NORMS, *ATTENTION, *more, *(FORWARD if layer < shape.dense_blocks else MIXTURE)]


def group_keys(shape: Any) -> Numbers:
    """Return the metadata of groups, where there are some."""
    counts: Numbers = {"expert_group_count": shape.groups, "expert_group_used_count": shape.groups_used}
    return counts if shape.groups > 1 else {}


def keys(shape: Any) -> Numbers:
    """Return the metadata."""
    more: Numbers = {
        "leading_dense_block_count": shape.dense_blocks,
        "expert_shared_count": shape.shared,
        "expert_gating_func": 2,
        "expert_weights_scale": shape.scale,
        "expert_weights_norm": shape.normalized,
        "rope.dimension_count": shape.turned,
    }
    return key_and_value_length(shape) | expert_keys(shape) | more | group_keys(shape)


def group_settings(shape: Any) -> dict[str, Any]:
    """Return the configuration of experts, dense blocks and groups."""
    return expert_settings(shape) | {
        "n_routed_experts": shape.experts,
        "n_shared_experts": shape.shared,
        "first_k_dense_replace": shape.dense_blocks,
        "routed_scaling_factor": shape.scale,
        "norm_topk_prob": shape.normalized,
        "n_group": shape.groups,
        "topk_group": shape.groups_used,
    }


def settings(shape: Any) -> dict[str, Any]:
    """Return the configuration."""
    heads = {"use_qk_norm": shape.norms, "attention_bias": shape.biases, "num_mtp_layers": 0}
    return group_settings(shape) | glm4.settings(shape) | heads


FAMILY = Family(
    block=rows,
    shapes=three(
        "glm4moe",
        GROUPED
        | {"turned": 6, "base": 1e6, "layers": 3, "experts_used": 3, "shared": 2, "scale": 1.5}
        | {"groups": 3, "groups_used": 2},
        {"heads": 4, "kv_heads": 1, "head_size": 20, "embd": 36, "turned": 10, "tied": True, "base": 500.0}
        | {"norms": False, "experts": 5, "experts_used": 3, "expert_ff": 32, "dense_blocks": 0},
        {"heads": 3, "kv_heads": 3, "head_size": 8, "embd": 24, "turned": 4, "layers": 3, "eps": 1e-3}
        | {"biases": False, "experts": 8, "experts_used": 4, "expert_ff": 40, "dense_blocks": 2}
        | {"scale": 2.5, "normalized": False, "groups": 4, "groups_used": 3},
        HeadShape,
    ),
    config="Glm4MoeConfig",
    model="Glm4MoeForCausalLM",
    keys=keys,
    settings=settings,
    without_adapter=(ROUTER,),
    adapts_by_weight=True,
    wide={"expert_ff": 256},
    constants=(SCORE_BIAS,),
)
