"""Falcon H1, with multipliers of 1."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.helpers.architecture_family import (
    ATTENTION,
    ENDS,
    GROUPED,
    OWN,
    SINGLE,
    Family,
    Numbers,
    Row,
    key_and_value_length,
    three,
)
from tests.helpers.architectures import granitehybrid


@dataclass(frozen=True, kw_only=True)
class SideBySideShape(granitehybrid.ScanShape):
    """The sizes of a model with attention and a scan in each block."""

    groups: int = 1
    inner_width: int = 64
    has_norm: bool = False

    @property
    def inner(self) -> int:
        return self.inner_width

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.groups * self.key_size

    @property
    def group_width(self) -> int:
        return self.inner // self.groups


def rows(shape: Any, layer: int) -> Sequence[Row]:
    """Return the weights of a block."""
    scan = [row for row in granitehybrid.SCAN if row[0] != "ssm_norm.weight"]
    if shape.has_norm:
        scan.insert(-1, ("ssm_norm.weight", "mamba.norm.weight", "groups group_width"))
    return [
        *scan,
        *ATTENTION,
        ("attn_norm.weight", "input_layernorm.weight", "embd"),
        ("ffn_norm", "pre_ff_layernorm.weight", "embd"),
        ("ffn_gate.weight", "feed_forward.gate_proj.weight", "ff embd"),
        ("ffn_up.weight", "feed_forward.up_proj.weight", "ff embd"),
        ("ffn_down.weight", "feed_forward.down_proj.weight", "embd ff"),
    ]


def keys(shape: Any) -> Numbers:
    """Return the metadata."""
    return key_and_value_length(shape) | {
        "vocab_size": shape.vocab,
        "ssm.conv_kernel": shape.taps,
        "ssm.state_size": shape.key_size,
        "ssm.group_count": shape.groups,
        "ssm.inner_size": shape.inner,
        "ssm.time_step_rank": shape.scan_heads,
    }


def settings(shape: Any) -> dict[str, Any]:
    """Return the configuration."""
    return {
        "mamba_d_ssm": shape.inner,
        "mamba_n_heads": shape.scan_heads,
        "mamba_n_groups": shape.groups,
        "mamba_d_state": shape.key_size,
        "mamba_d_conv": shape.taps,
        "mamba_chunk_size": 16,
        "mamba_rms_norm": shape.has_norm,
        "mamba_norm_before_gate": False,
    }


def to_theirs(shape: Any, name: str, array: Any) -> Any:
    """Convert a weight."""
    return array.ravel() if name.endswith("ssm_norm.weight") else granitehybrid.to_theirs(shape, name, array)


def gradient_to_ours(shape: Any, name: str, array: Any) -> Any:
    """Convert a gradient."""
    if name.endswith("ssm_norm.weight"):
        return array.reshape(shape.groups, -1)
    return granitehybrid.gradient_to_ours(shape, name, array)


def initial(shape: Any, name: str, axes: tuple[int, ...], random: Any) -> Any:
    """Return the values of weights that are unlike others; the name of a norm does not show that it is one."""
    if name.endswith("ffn_norm"):
        return 1 + np.float32(0.3) * random.standard_normal(axes, np.float32)
    return granitehybrid.initial(shape, name, axes, random)


FAMILY = Family(
    block=rows,
    ends=[ENDS[0], ("output_norm.weight", "model.final_layernorm.weight", "embd"), ENDS[2]],
    shapes=three(
        "falcon-h1",
        GROUPED | {"base": 1e6, "has_norm": True, "groups": 2},
        OWN | {"taps": 3, "scan_heads": 5, "inner_width": 60, "tied": True},
        SINGLE | {"key_size": 7, "scan_heads": 4, "inner_width": 28, "taps": 2, "eps": 1e-3},
        SideBySideShape,
    ),
    config="FalconH1Config",
    model="FalconH1ForCausalLM",
    keys=keys,
    settings=settings,
    without_adapter=("conv1d.weight", "ssm_a", "ssm_d", "ssm_norm.weight"),
    not_in_peft=("ssm_out.weight",),
    to_theirs=to_theirs,
    gradient_to_ours=gradient_to_ours,
    initial=initial,
    shifts_context=False,
    exact_shift=False,
)
