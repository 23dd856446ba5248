"""Gemma 4 without experts."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.helpers.architecture_family import (
    AROUND,
    ATTENTION,
    ENDS,
    Family,
    Numbers,
    Row,
    Shape,
    three,
)

WINDOW_BASE, NO_ROTATION = 300.0, 1e30
DEFAULT_CAP = 30.0  # of llama.cpp
SCALE = "layer_output_scale.weight"


@dataclass(frozen=True, kw_only=True)
class Gemma4Shape(Shape):
    """Sizes; those of heads, and of key/value heads, are of blocks with windows."""

    arch: str = "gemma4"
    full_size: int = 16  # of heads in blocks without a window
    full_kv_heads: int = 0  # 0: as many as with a window
    full_share: float = 0.25  # of a head without a window that rotates
    period: int = 3  # the last block of each has no window
    shared: int = 0  # blocks at the end without keys of their own
    doubled: bool = False  # whose feed-forward is twice as wide
    keys_are_values: bool = False  # in blocks without a window
    per_layer: int = 0
    logit_cap: float = DEFAULT_CAP

    @property
    def windowed(self) -> list[bool]:
        return [
            layer % self.period < self.period - 1 and layer < self.layers - 1 for layer in range(self.layers)
        ]

    @property
    def first_shared(self) -> int:
        return self.layers - self.shared if self.shared < self.layers else self.layers

    @property
    def full_width(self) -> int:
        return self.heads * self.full_size

    @property
    def full_kv_width(self) -> int:
        return (self.full_kv_heads or self.kv_heads) * self.full_size

    @property
    def per_layers(self) -> int:
        return self.layers * self.per_layer

    @property
    def one(self) -> int:
        return 1

    @property
    def factors(self) -> np.ndarray:
        """Of the rotation without a window."""
        pairs = np.arange(self.full_size // 2)
        return np.where(pairs < int(self.full_size * self.full_share / 2), 1.0, NO_ROTATION).astype(
            np.float32
        )


def block(shape: Gemma4Shape, layer: int) -> list[Row]:
    """Return the weights of a block."""
    full, shared = not shape.windowed[layer], layer >= shape.first_shared
    ff = "ff2" if shape.doubled and shared else "ff"
    rows = [
        *AROUND,
        *ATTENTION,
        *((f"attn_{x}_norm.weight", f"self_attn.{x}_norm.weight", "head_size") for x in "qk"),
    ]
    if full:
        swap = {"width": "full_width", "kv_width": "full_kv_width", "head_size": "full_size"}
        rows = [
            (mine, theirs, " ".join(swap.get(axis, axis) for axis in axes.split()))
            for mine, theirs, axes in rows
        ]
    without = ("attn_k", "attn_v") if shared else ("attn_v.",) if full and shape.keys_are_values else ()
    rows = [row for row in rows if not row[0].startswith(without)] if without else rows
    rows += [
        ("ffn_gate.weight", "mlp.gate_proj.weight", f"{ff} embd"),
        ("ffn_up.weight", "mlp.up_proj.weight", f"{ff} embd"),
        ("ffn_down.weight", "mlp.down_proj.weight", f"embd {ff}"),
        (SCALE, "layer_scalar", "one"),
    ]
    if shape.per_layer:
        rows += [
            ("inp_gate.weight", "per_layer_input_gate.weight", "per_layer embd"),
            ("proj.weight", "per_layer_projection.weight", "embd per_layer"),
            ("post_norm.weight", "post_per_layer_input_norm.weight", "embd"),
        ]
    return rows


def ends(shape: Gemma4Shape) -> list[Row]:
    """Return the weights before and behind all blocks."""
    more = [
        ("per_layer_token_embd.weight", "model.embed_tokens_per_layer.weight", "vocab per_layers"),
        ("per_layer_model_proj.weight", "model.per_layer_model_projection.weight", "per_layers embd"),
        ("per_layer_proj_norm.weight", "model.per_layer_projection_norm.weight", "per_layer"),
    ]
    return [ENDS[0], *(more if shape.per_layer else ()), *ENDS[1:]]


def keys(shape: Gemma4Shape) -> Numbers:
    """Return the metadata."""
    found: dict[str, Any] = {
        "attention.key_length": shape.full_size,
        "attention.value_length": shape.full_size,
        "attention.key_length_swa": shape.head_size,
        "attention.value_length_swa": shape.head_size,
        "attention.sliding_window": shape.window,
        "attention.sliding_window_pattern": shape.windowed,
        "attention.shared_kv_layers": shape.layers - shape.first_shared,
        "embedding_length_per_layer_input": shape.per_layer,
        "rope.freq_base_swa": WINDOW_BASE,
        "rope.dimension_count": shape.full_size,
        "rope.dimension_count_swa": shape.head_size,
    }
    if shape.logit_cap != DEFAULT_CAP:
        found["final_logit_softcapping"] = shape.logit_cap
    if shape.doubled:
        found["feed_forward_length"] = [
            shape.ff if layer < shape.first_shared else shape.ff2 for layer in range(shape.layers)
        ]
    if shape.full_kv_heads:
        found["attention.head_count_kv"] = [
            shape.kv_heads if windowed else shape.full_kv_heads for windowed in shape.windowed
        ]
    return found


def settings(shape: Gemma4Shape) -> dict[str, Any]:
    """Return the configuration."""
    kinds = {True: "sliding_attention", False: "full_attention"}
    rope = {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": shape.full_share,
            "rope_theta": shape.base,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": WINDOW_BASE},
    }
    return {
        "layer_types": [kinds[windowed] for windowed in shape.windowed],
        "global_head_dim": shape.full_size,
        "num_global_key_value_heads": shape.full_kv_heads or None,
        "attention_k_eq_v": shape.keys_are_values,
        "sliding_window": shape.window,
        "num_kv_shared_layers": shape.layers - shape.first_shared,
        "use_double_wide_mlp": shape.doubled,
        "hidden_size_per_layer_input": shape.per_layer,
        "vocab_size_per_layer_input": shape.vocab,
        "final_logit_softcapping": shape.logit_cap,
        "rope_parameters": rope,
    }


def initial(
    shape: Gemma4Shape, name: str, axes: tuple[int, ...], random: np.random.Generator
) -> np.ndarray | None:
    """Return scales near 1, embeddings for blocks as large as those of tokens, and norms that keep scores small.

    Scores have no scale of their own, and large ones are so sure of a key that rounding decides.
    """
    if name.endswith(SCALE):
        return np.float32(1) + np.float32(0.2) * random.standard_normal(axes, np.float32)
    if name.endswith(("attn_q_norm.weight", "attn_k_norm.weight")):
        return (1 + 0.3 * random.standard_normal(axes, np.float32)) * np.float32(1.2 * axes[0] ** -0.25)
    if name == "per_layer_token_embd.weight":
        return random.standard_normal(axes, np.float32) / np.float32(shape.per_layer**0.5)
    return None


FAMILY = Family(
    block=block,
    ends=ends,
    shapes=three(
        "gemma4",
        {
            "heads": 4,
            "kv_heads": 2,
            "head_size": 12,
            "full_size": 20,
            "embd": 48,
            "layers": 7,
            "window": 9,
            "base": 1e6,
            "shared": 4,
            "doubled": True,
            "per_layer": 18,
            "logit_cap": 3.0,
            "tied": True,
            "eps": 1e-6,
        },
        {
            "heads": 4,
            "kv_heads": 2,
            "full_kv_heads": 1,
            "head_size": 10,
            "full_size": 24,
            "embd": 36,
            "ff": 64,
            "layers": 5,
            "full_share": 0.5,
            "period": 2,
            "window": 5,
            "base": 500.0,
            "keys_are_values": True,
            "tied": True,
        },
        {
            "heads": 2,
            "kv_heads": 1,
            "head_size": 80,
            "full_size": 160,
            "embd": 96,
            "ff": 100,
            "layers": 4,
            "period": 2,
            "shared": 2,
            "per_layer": 40,
            "window": 16,
            "logit_cap": 15.0,
            "base": 1e6,
            "tied": True,
        },
        Gemma4Shape,
    ),
    config="Gemma4TextConfig",
    model="Gemma4ForCausalLM",
    half_float_gelu=True,
    keys=keys,
    settings=settings,
    initial=initial,
    constants=(SCALE,),
    tensors=lambda shape: {"rope_freqs.weight": shape.factors},
    wide={"full_size": 128, "per_layer": 256, "layers": 4, "period": 2, "shared": 2},
)
