"""StarCoder 2 (Lozhkov et al. 2024): layer norms, biases everywhere, and GELU without a gate.

The window that its configuration names is not in files, and llama.cpp attends to all keys.
"""

from dataclasses import replace
from functools import partial

from llamatrain.graph.ops import gelu
from llamatrain.model import layers
from llamatrain.model.architecture import Architecture
from llamatrain.model.forward import ForwardPass

MODULES = {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
BIASES = {
    name: replace(kind, optional=False) for name, kind in (layers.OUTPUT_BIAS | layers.UNGATED_BIASES).items()
}

ARCHITECTURE = Architecture(
    name="starcoder2",
    keys=layers.LAYER_NORM_KEYS,
    weights=layers.EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | layers.BEFORE_ATTENTION_BIAS
    | layers.ATTENTION
    | layers.BIASES
    | layers.BEFORE_FEED_FORWARD
    | layers.BEFORE_FEED_FORWARD_BIAS
    | layers.rename_modules(layers.UNGATED | BIASES, MODULES)
    | layers.FINAL_WITH_BIAS,
    rotation="halves",
    embed=layers.embed,
    block=partial(
        layers.block, norm=ForwardPass.layer_norm, transform=partial(layers.ungated, activation=gelu)
    ),
    final_norm=partial(layers.final_norm, norm=ForwardPass.layer_norm),
    heads_fill_width=True,
    supported_values=layers.SUPPORTED_VALUES,
    unsupported_names={"starcoder": "a model with learned positions"},
)
