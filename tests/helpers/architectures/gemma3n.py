"""Gemma 3n. llama.cpp takes only some of its sizes: those of streams, of embeddings for blocks, and of where keys end."""

import math
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.helpers.architecture_family import (
    AROUND,
    ATTENTION,
    ENDS,
    FORWARD,
    HEAD_NORMS,
    Family,
    Numbers,
    Row,
    Shape,
    key_and_value_length,
    three,
)
from tests.helpers.architectures.gemma4 import initial as initial_of_gemma4

OWN_KEYS, SPARSE, PERIOD = 20, 10, 5
DEVIATIONS = 1.6448533535003662  # of llama.cpp, above which activations are kept
KEYS_OF_BLOCKS = ("attn_k.", "attn_v.", "attn_k_norm.")


@dataclass(frozen=True, kw_only=True)
class Gemma3nShape(Shape):
    """Sizes; those below are the only ones that llama.cpp takes."""

    arch: str = "gemma3n"
    per_layer: int = 256
    rank: int = 64
    streams: int = 4
    logit_cap: float = 30.0

    @property
    def windowed(self) -> list[bool]:
        return [layer % PERIOD < PERIOD - 1 for layer in range(self.layers)]

    @property
    def shared(self) -> int:
        return max(0, self.layers - OWN_KEYS)

    @property
    def deviations(self) -> float:
        """As llama.cpp's, which divides the sum of squares by one less than there are."""
        return DEVIATIONS * math.sqrt(self.ff / (self.ff - 1))

    @property
    def per_layers(self) -> int:
        return self.layers * self.per_layer

    @property
    def others(self) -> int:
        return self.streams - 1

    @property
    def pairs(self) -> int:
        return self.streams**2


BLOCK = [
    *AROUND,
    *ATTENTION,
    *HEAD_NORMS,
    *FORWARD,
    ("inp_gate.weight", "per_layer_input_gate.weight", "per_layer embd"),
    ("proj.weight", "per_layer_projection.weight", "embd per_layer"),
    ("post_norm.weight", "post_per_layer_input_norm.weight", "embd"),
    ("altup_correct_coef.weight", "altup.correction_coefs.weight", "streams streams"),
    ("altup_correct_scale.weight", "altup.correct_output_scale", "embd"),
    ("altup_predict_coef.weight", "altup.prediction_coefs.weight", "pairs streams"),
    ("altup_router.weight", "altup.modality_router.weight", "streams embd"),
    ("altup_router_norm.weight", "altup.router_norm.weight", "embd"),
    ("laurel_l.weight", "laurel.linear_left.weight", "rank embd"),
    ("laurel_r.weight", "laurel.linear_right.weight", "embd rank"),
    ("laurel_post_norm.weight", "laurel.post_laurel_norm.weight", "embd"),
]
MORE_ENDS = [
    ("altup_proj.weight", "model.altup_projections.*.weight", "others embd embd"),
    ("altup_unembd_proj.weight", "model.altup_unembed_projections.*.weight", "others embd embd"),
    ("per_layer_token_embd.weight", "model.embed_tokens_per_layer.weight", "vocab per_layers"),
    ("per_layer_model_proj.weight", "model.per_layer_model_projection.weight", "per_layers embd"),
    ("per_layer_proj_norm.weight", "model.per_layer_projection_norm.weight", "per_layer"),
]


def block(shape: Gemma3nShape, layer: int) -> list[Row]:
    """Return the weights of a block."""
    return [row for row in BLOCK if layer < OWN_KEYS or not row[0].startswith(KEYS_OF_BLOCKS)]


def tensors(shape: Gemma3nShape) -> dict[str, np.ndarray]:
    """Return the keys and values that files have for blocks that read those of others."""
    made = {}
    for layer in range(OWN_KEYS, shape.layers):
        for mine, _, axes in BLOCK:
            if mine.startswith(KEYS_OF_BLOCKS):
                name, sizes = f"blk.{layer}.{mine}", tuple(getattr(shape, axis) for axis in axes.split())
                made[name] = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(
                    sizes, np.float32
                )
    return made


def keys(shape: Gemma3nShape) -> Numbers:
    """Return the metadata."""
    found: dict[str, Any] = {
        "attention.sliding_window": shape.window,
        "attention.sliding_window_pattern": shape.windowed,
        "attention.shared_kv_layers": shape.shared,
        "embedding_length_per_layer_input": shape.per_layer,
        "final_logit_softcapping": shape.logit_cap,
        "altup.active_idx": 0,
        "altup.num_inputs": shape.streams,
        "activation_sparsity_scale": [
            shape.deviations if layer < SPARSE else -math.inf for layer in range(shape.layers)
        ],
    }
    return key_and_value_length(shape) | found


def settings(shape: Gemma3nShape) -> dict[str, Any]:
    """Return the configuration."""
    kinds = {True: "sliding_attention", False: "full_attention"}
    whole, local = ({"rope_type": "default", "rope_theta": base} for base in (shape.base, 10000.0))
    share = 0.5 * (1 + math.erf(shape.deviations / math.sqrt(2)))
    return {
        "layer_types": [kinds[windowed] for windowed in shape.windowed],
        "sliding_window": shape.window,
        "num_kv_shared_layers": shape.shared,
        "hidden_size_per_layer_input": shape.per_layer,
        "vocab_size_per_layer_input": shape.vocab,
        "final_logit_softcapping": shape.logit_cap,
        "altup_num_inputs": shape.streams,
        "laurel_rank": shape.rank,
        "activation_sparsity_pattern": [share if layer < SPARSE else 0.0 for layer in range(shape.layers)],
        "rope_parameters": {"full_attention": whole, "sliding_attention": local},
    }


def initial(
    shape: Gemma3nShape, name: str, axes: tuple[int, ...], random: np.random.Generator
) -> np.ndarray | None:
    """Return scales near 1, a router whose numbers differ between tokens, and blocks that change streams a little.

    In a model of so many blocks that change much, rounding decides what is said.
    """
    if name.endswith("correct_scale.weight"):
        return np.float32(1) + np.float32(0.3) * random.standard_normal(axes, np.float32)
    if name.endswith(("predict_coef.weight", "correct_coef.weight")):
        return random.standard_normal(axes, np.float32) * np.float32(0.1)
    if name.endswith(
        ("post_norm.weight", "post_attention_norm.weight", "post_ffw_norm.weight", "laurel_post_norm.weight")
    ):
        return (1 + 0.3 * random.standard_normal(axes, np.float32)) * np.float32(0.3)
    if name.endswith("altup_router.weight"):
        return random.standard_normal(axes, np.float32) * np.float32(0.5 * shape.embd**0.5)
    return initial_of_gemma4(shape, name, axes, random)  # type: ignore[arg-type]


FAMILY = Family(
    block=block,
    ends=[ENDS[0], *MORE_ENDS, *ENDS[1:]],
    shapes=three(
        "gemma3n",
        {
            "heads": 4,
            "kv_heads": 2,
            "head_size": 8,
            "embd": 32,
            "layers": 25,
            "ff": 384,
            "window": 9,
            "base": 1e6,
            "tied": True,
            "eps": 1e-3,  # with a smaller one, rounding grows a hundredfold in 30 steps, in torch too
        },
        {
            "heads": 4,
            "kv_heads": 1,
            "head_size": 10,
            "embd": 36,
            "ff": 448,
            "layers": 6,
            "window": 5,
            "base": 500.0,
            "tied": True,
        },
        {
            "heads": 2,
            "kv_heads": 1,
            "head_size": 48,
            "embd": 96,
            "ff": 512,
            "layers": 11,
            "window": 16,
            "base": 1e6,
            "tied": True,
        },
        Gemma3nShape,
    ),
    config="Gemma3nTextConfig",
    model="Gemma3nForCausalLM",
    half_float_gelu=True,
    gelu_error=2e-4,  # more blocks than others, with more gelus
    keys=keys,
    settings=settings,
    initial=initial,
    tensors=tensors,
    without_adapter=("altup_router.weight",),
)
