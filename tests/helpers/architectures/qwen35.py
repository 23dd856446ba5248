"""Qwen 3.5."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from tests.helpers.architecture_family import (
    BROAD,
    FORWARD,
    GROUPED,
    HEAD_NORMS,
    OWN,
    Family,
    Numbers,
    Row,
    Shape,
    key_and_value_length,
    three,
)


@dataclass(frozen=True, kw_only=True)
class HybridShape(Shape):
    """The sizes of a model with gated delta nets."""

    period: int = 2
    taps: int = 4
    key_size: int = 8
    key_heads: int = 2
    value_heads: int = 4
    value_size: int = 8  # llama.cpp needs that of a key

    @property
    def two_widths(self) -> int:
        return 2 * self.width

    @property
    def values(self) -> int:
        return self.value_heads * self.value_size

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_size + self.values


NORMS = [
    ("attn_norm.weight", "input_layernorm.weight", "embd"),
    ("post_attention_norm.weight", "post_attention_layernorm.weight", "embd"),
]
ATTENTION = [
    ("attn_q.weight", "self_attn.q_proj.weight", "two_widths embd"),
    ("attn_k.weight", "self_attn.k_proj.weight", "kv_width embd"),
    ("attn_v.weight", "self_attn.v_proj.weight", "kv_width embd"),
    ("attn_output.weight", "self_attn.o_proj.weight", "embd width"),
    *HEAD_NORMS,
]
DELTA_NET = [
    ("attn_qkv.weight", "linear_attn.in_proj_qkv.weight", "channels embd"),
    ("attn_gate.weight", "linear_attn.in_proj_z.weight", "values embd"),
    ("ssm_alpha.weight", "linear_attn.in_proj_a.weight", "value_heads embd"),
    ("ssm_beta.weight", "linear_attn.in_proj_b.weight", "value_heads embd"),
    ("ssm_conv1d.weight", "linear_attn.conv1d.weight", "channels taps"),
    ("ssm_dt.bias", "linear_attn.dt_bias", "value_heads"),
    ("ssm_a", "linear_attn.A_log", "value_heads"),
    ("ssm_norm.weight", "linear_attn.norm.weight", "value_size"),
    ("ssm_out.weight", "linear_attn.out_proj.weight", "embd values"),
]


def is_recurrent(shape: Any, layer: int) -> bool:
    """Return True if a block has a gated delta net."""
    return (layer + 1) % shape.period != 0


def rows(shape: Any, layer: int) -> Sequence[Row]:
    """Return the weights of a block."""
    return [*NORMS, *(DELTA_NET if is_recurrent(shape, layer) else ATTENTION), *FORWARD]


def keys(shape: Any) -> Numbers:
    """Return the metadata."""
    pairs = (shape.turned or shape.head_size) // 2
    return key_and_value_length(shape) | {
        "rope.dimension_count": 2 * pairs,
        "rope.dimension_sections": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3, 0],
        "full_attention_interval": shape.period,
        "ssm.conv_kernel": shape.taps,
        "ssm.state_size": shape.key_size,
        "ssm.group_count": shape.key_heads,
        "ssm.time_step_rank": shape.value_heads,
        "ssm.inner_size": shape.values,
    }


def settings(shape: Any) -> dict[str, Any]:
    """Return the configuration."""
    turned = shape.turned or shape.head_size
    return {
        "layer_types": [
            "linear_attention" if is_recurrent(shape, layer) else "full_attention"
            for layer in range(shape.layers)
        ],
        "linear_conv_kernel_dim": shape.taps,
        "linear_key_head_dim": shape.key_size,
        "linear_value_head_dim": shape.value_size,
        "linear_num_key_heads": shape.key_heads,
        "linear_num_value_heads": shape.value_heads,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.base,
            "partial_rotary_factor": turned / shape.head_size,
            "mrope_section": [turned // 2 - 2 * (turned // 6), turned // 6, turned // 6],
            "mrope_interleaved": True,
        },
    }


VALUE_ROWS = ("attn_gate.weight", "ssm_alpha.weight", "ssm_beta.weight", "ssm_dt.bias", "ssm_a")


def swap_heads(shape: Any, name: str, array: np.ndarray, back: bool) -> np.ndarray:
    """Convert the value heads of a weight from the tiled order of files to Hugging Face's groups, or back."""
    pair = (shape.key_heads, shape.value_heads // shape.key_heads)
    outer, inner = pair if back else pair[::-1]

    def swap(x: np.ndarray) -> np.ndarray:
        return x.reshape(outer, inner, -1).swapaxes(0, 1).reshape(x.shape)

    part = name.split(".", 2)[-1]
    if part in VALUE_ROWS:
        return swap(array)
    if part in ("attn_qkv.weight", "ssm_conv1d.weight"):
        first = 2 * shape.key_heads * shape.key_size
        return np.concatenate([array[:first], swap(array[first:])])
    return swap(array.T.copy()).T.copy() if part == "ssm_out.weight" else array


def to_theirs(shape: Any, name: str, array: np.ndarray) -> np.ndarray:
    """Convert a weight; the factors of an adapter have the rows of their weight."""
    array = swap_heads(shape, name, array, back=False)
    if name.endswith("ssm_a"):
        return np.log(-array)
    return array[:, None] if name.endswith("conv1d.weight") else array


def gradient_to_ours(shape: Any, name: str, array: np.ndarray) -> np.ndarray:
    """Convert a gradient: that of A's logarithm is A times that of A."""
    if name.endswith("conv1d.weight"):
        array = array[:, 0]
    return swap_heads(shape, name, array, back=True)


def initial(shape: Any, name: str, axes: tuple[int, ...], random: np.random.Generator) -> np.ndarray | None:
    """Return factors of the decay below 0, and taps of about one half."""
    if name.endswith("ssm_a"):
        return -random.uniform(0.2, 4, axes).astype(np.float32)
    return None


def adjust(shape: Any, name: str = "qwen3_5") -> None:
    """Give keys and queries the epsilon of the norms, which is the constant there in all published models."""
    modeling = import_module(f"transformers.models.{name}.modeling_{name}")

    def unit_length(x: Any, dim: int, eps: float) -> Any:
        return x / (x.square().sum(dim, keepdim=True) + shape.eps).sqrt()

    modeling.l2norm = unit_length  # type: ignore[attr-defined]


def input_order(shape: Any, name: str) -> np.ndarray | None:
    """Return the order of the inputs of a weight."""
    if not name.endswith("ssm_out.weight"):
        return None
    return swap_heads(shape, "blk.0.attn_gate.weight", np.arange(shape.values), back=False)


# Outputs of a gated delta net are normed, and that of a sample's first token has the sign of q · k: with a small
# epsilon, the slightest difference grows from step to step, also between two runs of torch.
FAMILY = Family(
    block=rows,
    shapes=three(
        "qwen35",
        GROUPED | {"base": 1e6, "eps": 3e-3, "layers": 4, "turned": 6},
        OWN
        | {
            "tied": True,
            "eps": 5e-2,
            "layers": 3,
            "period": 3,
            "key_heads": 3,
            "value_heads": 3,
            "turned": 8,
        },
        BROAD
        | {
            "base": 500.0,
            "eps": 1e-3,
            "key_size": 16,
            "value_size": 16,
            "key_heads": 1,
            "value_heads": 3,
            "taps": 3,
            "turned": 20,
        },
        HybridShape,
    ),
    config="Qwen3_5TextConfig",
    model="Qwen3_5ForCausalLM",
    keys=keys,
    settings=settings,
    without_adapter=("conv1d.weight",),
    to_theirs=to_theirs,
    gradient_to_ours=gradient_to_ours,
    shifts_context=False,
    exact_shift=False,
    initial=initial,
    adjust=adjust,
    input_order=input_order,
    norms_less_one=True,
)
