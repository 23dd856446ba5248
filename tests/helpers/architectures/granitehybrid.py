"""Granite 4 with Mamba blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.helpers.architecture_family import (
    ATTENTION,
    BEFORE,
    GROUPED,
    Family,
    Numbers,
    Row,
    Shape,
    rotary_keys,
    three,
)
from tests.helpers.architectures import granite


@dataclass(frozen=True, kw_only=True)
class ScanShape(Shape):
    """The sizes of a model with scans, whose values are twice as wide as the model."""

    attending: tuple[int, ...] = (1,)  # the blocks that have attention
    taps: int = 4
    key_size: int = 16
    scan_heads: int = 8
    rotates: bool = False
    one: int = 1

    @property
    def inner(self) -> int:
        return 2 * self.embd

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.key_size

    @property
    def into(self) -> int:
        return self.inner + self.channels + self.scan_heads


SCAN = [
    ("ssm_in.weight", "mamba.in_proj.weight", "into embd"),
    ("ssm_conv1d.weight", "mamba.conv1d.weight", "channels taps"),
    ("ssm_conv1d.bias", "mamba.conv1d.bias", "channels"),
    ("ssm_dt.bias", "mamba.dt_bias", "scan_heads"),
    ("ssm_a", "mamba.A_log", "scan_heads one"),
    ("ssm_d", "mamba.D", "scan_heads one"),
    ("ssm_norm.weight", "mamba.norm.weight", "one inner"),
    ("ssm_out.weight", "mamba.out_proj.weight", "embd inner"),
]
FORWARD = [
    ("ffn_gate.weight", "shared_mlp.input_linear.weight#0", "ff embd"),
    ("ffn_up.weight", "shared_mlp.input_linear.weight#1", "ff embd"),
    ("ffn_down.weight", "shared_mlp.output_linear.weight", "embd ff"),
]


def rows(shape: Any, layer: int) -> Sequence[Row]:
    """Return the weights of a block."""
    return [*BEFORE, *(ATTENTION if layer in shape.attending else SCAN), *FORWARD]


def keys(shape: Any) -> Numbers:
    """Return the metadata."""
    heads = [shape.kv_heads if layer in shape.attending else 0 for layer in range(shape.layers)]
    return (
        rotary_keys(shape)
        | granite.keys(shape)
        | {
            "attention.head_count_kv": heads,
            "rope.scaling.finetuned": shape.rotates,
            "ssm.conv_kernel": shape.taps,
            "ssm.state_size": shape.key_size,
            "ssm.group_count": 1,
            "ssm.inner_size": shape.inner,
            "ssm.time_step_rank": shape.scan_heads,
        }
    )


def settings(shape: Any) -> dict[str, Any]:
    """Return the configuration."""
    return granite.settings(shape) | {
        "layer_types": [
            "attention" if layer in shape.attending else "linear_attention" for layer in range(shape.layers)
        ],
        "position_embedding_type": "rope" if shape.rotates else None,
        "shared_intermediate_size": shape.ff,
        "num_local_experts": 0,
        "mamba_n_heads": shape.scan_heads,
        "mamba_d_state": shape.key_size,
        "mamba_d_conv": shape.taps,
        "mamba_chunk_size": 16,
    }


def to_theirs(shape: Any, name: str, array: np.ndarray) -> np.ndarray:
    """Convert a weight."""
    if name.endswith("ssm_a"):
        return np.log(-array)[:, 0]
    if name.endswith("ssm_d"):
        return array[:, 0]
    if name.endswith("ssm_norm.weight"):
        return array[0]
    return array[:, None] if name.endswith("conv1d.weight") else array


def gradient_to_ours(shape: Any, name: str, array: np.ndarray) -> np.ndarray:
    """Convert a gradient."""
    if name.endswith(("ssm_a", "ssm_d")):
        return array[:, None]
    if name.endswith("ssm_norm.weight"):
        return array[None]
    return array[:, 0] if name.endswith("conv1d.weight") else array


def initial(shape: Any, name: str, axes: tuple[int, ...], random: np.random.Generator) -> np.ndarray | None:
    """Return factors of the decay below 0, taps of about one half, and a norm around 1."""
    if name.endswith("ssm_a"):
        return -random.uniform(0.2, 4, axes).astype(np.float32)
    if name.endswith("ssm_norm.weight"):
        return 1 + np.float32(0.3) * random.standard_normal(axes, np.float32)
    return np.float32(0.5) * random.standard_normal(axes, np.float32) if "conv1d.weight" in name else None


FAMILY = Family(
    block=rows,
    shapes=three(
        "granitehybrid",
        GROUPED | granite.FIRST | {"layers": 3, "tied": True},
        granite.SECOND
        | {"heads": 4, "kv_heads": 1, "head_size": 10, "embd": 40, "ff": 64, "taps": 3, "scan_heads": 5}
        | {"attending": (0,), "rotates": True},
        granite.THIRD
        | {"heads": 3, "kv_heads": 3, "head_size": 6, "embd": 18, "ff": 40, "layers": 3, "tied": True}
        | {"attending": (2,), "key_size": 7, "scan_heads": 4, "taps": 2},
        ScanShape,
    ),
    config="GraniteMoeHybridConfig",
    model="GraniteMoeHybridForCausalLM",
    pairs=True,
    keys=keys,
    settings=settings,
    without_adapter=("conv1d.weight", "ssm_a", "ssm_d", "ssm_norm.weight"),
    not_in_peft=("ffn_gate.weight", "ffn_up.weight"),  # one module; `test_joined_modules` has their adapters
    to_theirs=to_theirs,
    gradient_to_ours=gradient_to_ours,
    initial=initial,
    wide={"scan_heads": 8},
    shifts_context=False,
    exact_shift=False,
)
