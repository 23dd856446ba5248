"""DeepSeek V3, with stacks that make keys and values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.helpers.architecture_family import (
    BEFORE,
    FORWARD,
    ROUTER,
    SCORE_BIAS,
    Family,
    Row,
    expert_keys,
    three,
)
from tests.helpers.architectures import glm4moe


@dataclass(frozen=True, kw_only=True)
class LatentShape(glm4moe.GroupedShape):
    """The sizes of a model whose keys and values are made from latents."""

    kv_rank: int = 16
    q_rank: int = 20
    still: int = 8  # of a key, elements that do not rotate
    value: int = 12
    factor: float = 0.0  # of YaRN
    fast: float = 32.0
    multiplier: float = 0.0  # of YaRN's lengths

    @property
    def key(self) -> int:
        """The size of a key."""
        return self.still + self.turned

    @property
    def all_q(self) -> int:
        """The width of all queries."""
        return self.heads * self.key

    @property
    def all_v(self) -> int:
        """The width of all values."""
        return self.heads * self.value

    @property
    def both(self) -> int:
        """The width of all values and of what does not rotate of keys."""
        return self.heads * (self.still + self.value)

    @property
    def latent(self) -> int:
        """The width of a latent with the key that rotates."""
        return self.kv_rank + self.turned


LATENTS = [
    ("attn_kv_a_mqa.weight", "self_attn.kv_a_proj_with_mqa.weight", "latent embd"),
    ("attn_kv_a_norm.weight", "self_attn.kv_a_layernorm.weight", "kv_rank"),
]
OUTPUT = [("attn_output.weight", "self_attn.o_proj.weight", "embd all_v")]
STACKS = [
    ("attn_k_b.weight", "self_attn.kv_b_proj.weight#0", "heads kv_rank still"),
    ("attn_v_b.weight", "self_attn.kv_b_proj.weight#1", "heads value kv_rank"),
]
Q_LATENT = [
    ("attn_q_a.weight", "self_attn.q_a_proj.weight", "q_rank embd"),
    ("attn_q_a_norm.weight", "self_attn.q_a_layernorm.weight", "q_rank"),
    ("attn_q_b.weight", "self_attn.q_b_proj.weight", "all_q q_rank"),
]
PLAIN_Q = [("attn_q.weight", "self_attn.q_proj.weight", "all_q embd")]
JOINED = [("attn_kv_b.weight", "self_attn.kv_b_proj.weight", "both kv_rank")]
# llama.cpp applies no adapters to these, so that they get none by default
PROJECTIONS = [*LATENTS, *Q_LATENT, *PLAIN_Q, *JOINED]


def rows(shape: Any, layer: int) -> Sequence[Row]:
    """Return the weights of a block."""
    forward = FORWARD if layer < shape.dense_blocks else glm4moe.MIXTURE
    return [*BEFORE, *Q_LATENT, *LATENTS, *STACKS, *OUTPUT, *forward]


def yarn_keys(shape: Any) -> dict[str, Any]:
    """Return the metadata of YaRN, if a model has it."""
    found = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": shape.factor,
        "rope.scaling.original_context_length": shape.original_ctx,
        "rope.scaling.yarn_beta_fast": shape.fast,
    }
    multiplier = {"rope.scaling.yarn_log_multiplier": 0.1 * shape.multiplier} if shape.multiplier else {}
    return found | multiplier if shape.factor else {}


def common_keys(shape: Any) -> dict[str, Any]:
    """Return the metadata of both forms of files."""
    more: dict[str, Any] = {
        "attention.q_lora_rank": shape.q_rank,
        "attention.kv_lora_rank": shape.kv_rank,
        "leading_dense_block_count": shape.dense_blocks,
        "expert_shared_count": shape.shared,
        "expert_weights_scale": shape.scale,
        "expert_weights_norm": shape.normalized,
        "rope.dimension_count": shape.turned,
    }
    return expert_keys(shape) | more | glm4moe.group_keys(shape) | yarn_keys(shape)


def keys(shape: Any) -> dict[str, Any]:
    """Return the metadata of a file with stacks."""
    return common_keys(shape) | {
        "attention.head_count_kv": 1,
        "attention.key_length": shape.kv_rank + shape.turned,
        "attention.value_length": shape.kv_rank,
        "attention.key_length_mla": shape.key,
        "attention.value_length_mla": shape.value,
        "expert_gating_func": 2,
    }


def settings(shape: Any) -> dict[str, Any]:
    """Return the configuration."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": shape.base}
    if shape.factor:
        rope |= {
            "rope_type": "yarn",
            "factor": shape.factor,
            "original_max_position_embeddings": shape.original_ctx,
            "beta_fast": shape.fast,
            "beta_slow": 1.0,
            "mscale": shape.multiplier,
            "mscale_all_dim": shape.multiplier,
        }
    return glm4moe.group_settings(shape) | {
        "head_dim": shape.turned,
        "q_lora_rank": shape.q_rank or None,
        "kv_lora_rank": shape.kv_rank,
        "qk_nope_head_dim": shape.still,
        "qk_rope_head_dim": shape.turned,
        "v_head_dim": shape.value,
        "num_mtp_layers": 0,
        "rope_parameters": rope,
    }


def to_theirs(shape: Any, name: str, array: np.ndarray) -> np.ndarray:
    """Convert a weight: matrices that make keys lie the other way."""
    return array.swapaxes(1, 2) if name.endswith("attn_k_b.weight") else array


def gradient_to_ours(shape: Any, name: str, array: np.ndarray) -> np.ndarray:
    """Convert a gradient."""
    if name.endswith("attn_k_b.weight"):
        return array.reshape(shape.heads, shape.still, -1).swapaxes(1, 2)
    return array.reshape(shape.heads, shape.value, -1) if name.endswith("attn_v_b.weight") else array


def whole_to_theirs(shape: Any, name: str, array: np.ndarray) -> np.ndarray:
    """Convert a whole weight: the matrices of heads follow each other."""
    return array.reshape(-1, array.shape[-1]) if "kv_b_proj" in name else array


def part_rows(shape: Any, name: str) -> np.ndarray | None:
    """Return the rows of a stack in the weight that has those of keys and values of each head."""
    rows_of_heads = np.arange(shape.both).reshape(shape.heads, -1)
    if name.endswith("attn_k_b.weight"):
        return rows_of_heads[:, : shape.still].ravel()
    return rows_of_heads[:, shape.still :].ravel() if name.endswith("attn_v_b.weight") else None


def use_eps(shape: Any, family: str) -> None:
    """Change the epsilon of the norms of latents, which Hugging Face's models have as a constant."""
    from importlib import import_module

    name = family.replace("_", "").replace("deepseekv", "DeepseekV")
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    getattr(module, f"{name}RMSNorm").__init__.__defaults__ = (shape.eps,)


FAMILY = Family(
    block=rows,
    shapes=three(
        "deepseek2",
        {"heads": 4, "kv_heads": 4, "embd": 48, "still": 10, "turned": 6, "value": 12, "layers": 3}
        | {"base": 1e5, "eps": 1e-6, "experts_used": 3, "shared": 2, "scale": 2.5}
        | {"groups": 3, "groups_used": 2},
        {"heads": 3, "kv_heads": 3, "embd": 36, "still": 6, "turned": 8, "value": 14, "tied": True}
        | {"q_rank": 16, "kv_rank": 24, "factor": 2.0, "multiplier": 0.9, "original_ctx": 16, "ff": 64}
        | {"experts": 5, "experts_used": 4, "expert_ff": 32, "dense_blocks": 0},
        {"heads": 2, "kv_heads": 2, "embd": 24, "still": 4, "turned": 4, "value": 20, "eps": 1e-3}
        | {"factor": 8.0, "multiplier": 0.7, "original_ctx": 8, "fast": 4.0, "layers": 3, "ff": 40}
        | {"experts": 8, "experts_used": 4, "expert_ff": 40, "dense_blocks": 2, "scale": 1.5}
        | {"normalized": False, "groups": 4, "groups_used": 3},
        LatentShape,
    ),
    config="DeepseekV3Config",
    model="DeepseekV3ForCausalLM",
    keys=keys,
    settings=settings,
    without_adapter=(*(name for name, _, _ in PROJECTIONS), ROUTER),
    adapts_by_weight=True,
    groups_heads=False,
    wide={"expert_ff": 256, "kv_rank": 256, "q_rank": 256, "still": 64, "value": 64},
    constants=(SCORE_BIAS,),
    to_theirs=to_theirs,
    gradient_to_ours=gradient_to_ours,
    whole_to_theirs=whole_to_theirs,
    part_rows=part_rows,
    adjust=lambda shape: use_eps(shape, "deepseek_v3"),
)
