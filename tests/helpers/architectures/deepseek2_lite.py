"""DeepSeek V2 Lite, which files name a deepseek2; old ones have one matrix that makes keys and values."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.helpers.architecture_family import BEFORE, EXPERTS, FORWARD, Row, shared_rows, three
from tests.helpers.architectures import deepseek2
from tests.helpers.architectures.deepseek2 import JOINED, LATENTS, OUTPUT, PLAIN_Q, STACKS


@dataclass(frozen=True, kw_only=True)
class LiteShape(deepseek2.LatentShape):
    """The sizes of a model with plain queries, and whether its file has one matrix or stacks."""

    q_rank: int = 0
    normalized: bool = False
    joined: bool = True

    @property
    def file_arch(self) -> str:
        return "deepseek2"


def rows(shape: Any, layer: int) -> Sequence[Row]:
    """Return the weights of a block."""
    forward = FORWARD if layer < shape.dense_blocks else [*EXPERTS, *shared_rows("mlp.shared_experts")]
    return [*BEFORE, *PLAIN_Q, *LATENTS, *(JOINED if shape.joined else STACKS), *OUTPUT, *forward]


def keys(shape: Any) -> dict[str, Any]:
    """Return the metadata."""
    if not shape.joined:
        return deepseek2.keys(shape) | {"expert_gating_func": 1}
    lengths = {
        "attention.head_count_kv": shape.heads,
        "attention.key_length": shape.key,
        "attention.value_length": shape.value,
    }
    return deepseek2.common_keys(shape) | lengths


FAMILY = replace(
    deepseek2.FAMILY,
    block=rows,
    shapes=three(
        "deepseek2-lite",
        {"heads": 4, "kv_heads": 4, "embd": 48, "still": 10, "turned": 6, "value": 12, "layers": 3}
        | {"eps": 1e-6, "experts_used": 3, "shared": 2},
        {"heads": 3, "kv_heads": 3, "embd": 36, "still": 6, "turned": 8, "value": 10, "tied": True}
        | {"kv_rank": 24, "factor": 4.0, "multiplier": 0.707, "original_ctx": 16, "ff": 64}
        | {"experts": 5, "experts_used": 3, "expert_ff": 32, "dense_blocks": 0, "base": 500.0},
        {"heads": 2, "kv_heads": 2, "embd": 24, "still": 4, "turned": 4, "value": 12, "eps": 1e-3}
        | {"factor": 8.0, "multiplier": 1.0, "original_ctx": 8, "joined": False, "layers": 3, "ff": 40}
        | {"experts": 8, "experts_used": 4, "expert_ff": 40, "dense_blocks": 2, "scale": 1.5},
        LiteShape,
    ),
    config="DeepseekV2Config",
    model="DeepseekV2ForCausalLM",
    keys=keys,
    wide={"expert_ff": 256, "kv_rank": 256, "still": 64, "value": 64},
    constants=(),
    adjust=lambda shape: deepseek2.use_eps(shape, "deepseek_v2"),
)
