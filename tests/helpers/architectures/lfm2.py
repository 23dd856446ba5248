"""LFM 2."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.helpers.architecture_family import (
    ENDS,
    GROUPED,
    SINGLE,
    Family,
    Numbers,
    Row,
    Shape,
    rotary_keys,
    three,
)


@dataclass(frozen=True, kw_only=True)
class ConvolutionShape(Shape):
    """The sizes of a model with short convolutions."""

    attending: tuple[int, ...] = (1,)  # the blocks that have attention
    taps: int = 3

    @property
    def three_widths(self) -> int:
        return 3 * self.embd


NORMS = [
    ("attn_norm.weight", "operator_norm.weight", "embd"),
    ("ffn_norm.weight", "ffn_norm.weight", "embd"),
]
ATTENTION = [
    ("attn_q.weight", "self_attn.q_proj.weight", "width embd"),
    ("attn_k.weight", "self_attn.k_proj.weight", "kv_width embd"),
    ("attn_v.weight", "self_attn.v_proj.weight", "kv_width embd"),
    ("attn_output.weight", "self_attn.out_proj.weight", "embd width"),
    ("attn_q_norm.weight", "self_attn.q_layernorm.weight", "head_size"),
    ("attn_k_norm.weight", "self_attn.k_layernorm.weight", "head_size"),
]
CONVOLUTION = [
    ("shortconv.in_proj.weight", "conv.in_proj.weight", "three_widths embd"),
    ("shortconv.conv.weight", "conv.conv.weight", "embd taps"),
    ("shortconv.out_proj.weight", "conv.out_proj.weight", "embd embd"),
]
FORWARD = [
    ("ffn_gate.weight", "feed_forward.w1.weight", "ff embd"),
    ("ffn_up.weight", "feed_forward.w3.weight", "ff embd"),
    ("ffn_down.weight", "feed_forward.w2.weight", "embd ff"),
]


def rows(shape: Any, layer: int) -> Sequence[Row]:
    """Return the weights of a block."""
    return [*NORMS, *(ATTENTION if layer in shape.attending else CONVOLUTION), *FORWARD]


def keys(shape: Any) -> Numbers:
    """Return the metadata."""
    heads = [shape.kv_heads if layer in shape.attending else 0 for layer in range(shape.layers)]
    return rotary_keys(shape) | {"attention.head_count_kv": heads, "shortconv.l_cache": shape.taps}


def settings(shape: Any) -> dict[str, Any]:
    """Return the configuration."""
    return {
        "norm_eps": shape.eps,
        "layer_types": [
            "full_attention" if layer in shape.attending else "conv" for layer in range(shape.layers)
        ],
        "conv_L_cache": shape.taps,
        "block_auto_adjust_ff_dim": False,
    }


def to_theirs(shape: Shape, name: str, array: np.ndarray) -> np.ndarray:
    """Convert a weight."""
    return array[:, None] if name.endswith("conv.weight") else array


def gradient_to_ours(shape: Shape, name: str, array: np.ndarray) -> np.ndarray:
    """Convert a gradient."""
    return array[:, 0] if name.endswith("conv.weight") else array


FAMILY = Family(
    block=rows,
    ends=[ENDS[0], ("token_embd_norm.weight", "model.embedding_norm.weight", "embd"), ENDS[2]],
    shapes=three(
        "lfm2",
        GROUPED | {"base": 1e6, "layers": 4, "attending": (1, 3), "tied": True},
        {
            "heads": 4,
            "kv_heads": 1,
            "head_size": 10,
            "embd": 40,
            "ff": 64,
            "taps": 4,
            "attending": (0,),
            "layers": 3,
        },
        SINGLE | {"eps": 1e-3, "taps": 2, "attending": (2,), "tied": True},
        ConvolutionShape,
    ),
    config="Lfm2Config",
    model="Lfm2ForCausalLM",
    keys=keys,
    settings=settings,
    without_adapter=("conv.weight",),
    to_theirs=to_theirs,
    gradient_to_ours=gradient_to_ours,
    shifts_context=False,
    exact_shift=False,
)
