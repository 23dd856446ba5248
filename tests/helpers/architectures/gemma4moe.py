"""Gemma 4 with experts, which files name a gemma4."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.helpers.architecture_family import (
    ROUTER,
    ExpertShape,
    Numbers,
    Row,
    expert_keys,
    expert_rows,
    join_stacks,
    three,
)
from tests.helpers.architectures import gemma4


@dataclass(frozen=True, kw_only=True)
class MixedShape(gemma4.Gemma4Shape, ExpertShape):
    """The sizes of a model with experts."""

    tied: bool = True

    @property
    def file_arch(self) -> str:
        return "gemma4"


SCALES = ("ffn_gate_inp.scale", "ffn_down_exps.scale")
MIXTURE = [
    *(
        (f"{mine}.weight", f"{theirs}.weight", "embd")
        for mine, theirs in (
            ("post_ffw_norm_1", "post_feedforward_layernorm_1"),
            ("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
            ("post_ffw_norm_2", "post_feedforward_layernorm_2"),
        )
    ),
    *expert_rows("router.proj", "experts"),
    (SCALES[0], "router.scale", "embd"),
    (SCALES[1], "router.per_expert_scale", "experts"),
]


def block(shape: Any, layer: int) -> Sequence[Row]:
    """Return the weights of a block."""
    return [*gemma4.block(shape, layer), *join_stacks(shape, MIXTURE)]


def keys(shape: Any) -> Numbers:
    """Return the metadata."""
    return gemma4.keys(shape) | expert_keys(shape)


def settings(shape: Any) -> dict[str, Any]:
    """Return the configuration."""
    return gemma4.settings(shape) | {
        "enable_moe_block": True,
        "num_experts": shape.experts,
        "top_k_experts": shape.experts_used,
        "moe_intermediate_size": shape.expert_ff,
    }


def initial(shape: Any, name: str, axes: tuple[int, ...], random: np.random.Generator) -> np.ndarray | None:
    """Return factors near 1, and a router whose scores differ, though its input is short."""
    if name.endswith(SCALES):
        return np.float32(1) + np.float32(0.3) * random.standard_normal(axes, np.float32)
    if name.endswith(ROUTER):
        return np.float32(2) * random.standard_normal(axes, np.float32)
    return gemma4.initial(shape, name, axes, random)


FAMILY = replace(
    gemma4.FAMILY,
    block=block,
    shapes=three(
        "gemma4moe",
        {"heads": 4, "kv_heads": 2, "full_kv_heads": 1, "head_size": 12, "full_size": 20, "embd": 48}
        | {"layers": 3, "window": 9, "base": 1e6, "keys_are_values": True, "logit_cap": 3.0, "eps": 1e-6}
        | {"experts": 4, "experts_used": 3, "joined_stacks": True},
        {"heads": 4, "kv_heads": 2, "head_size": 10, "full_size": 24, "full_share": 0.5, "embd": 36, "ff": 64}
        | {"layers": 3, "period": 2, "window": 5, "base": 500.0}
        | {"experts": 5, "experts_used": 4, "expert_ff": 32},
        {"heads": 2, "kv_heads": 1, "head_size": 80, "full_size": 160, "embd": 96, "ff": 100}
        | {"layers": 3, "period": 2, "shared": 1, "doubled": True, "per_layer": 40, "window": 16}
        | {"logit_cap": 15.0, "base": 1e6}
        | {"experts": 7, "experts_used": 7, "expert_ff": 40, "joined_stacks": True},
        MixedShape,
    ),
    keys=keys,
    settings=settings,
    initial=initial,
    gelu_error=1e-4,  # blocks have twice as many gelus
    without_adapter=(ROUTER,),
    # llama.cpp would add what an adapter contributes without the scale of experts, with which PEFT multiplies it
    stacks_without_adapter=("ffn_down_exps.weight",),
    wide={"full_size": 128, "layers": 4, "period": 2, "shared": 2, "expert_ff": 256},
)
