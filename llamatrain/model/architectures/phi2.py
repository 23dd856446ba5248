"""Phi 1, 1.5 and 2 (Gunasekar et al. 2023): attention and feed-forward side by side, and biases everywhere.

Even logits have a bias. Heads rotate in part, and GELU has no gate.
"""

from dataclasses import replace
from functools import partial

from llamatrain.graph.ops import gelu
from llamatrain.model import layers
from llamatrain.model.architecture import Architecture, WeightKind
from llamatrain.model.forward import ForwardPass

MODULES = {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
BIASES = {
    name: replace(kind, optional=False)
    for name, kind in (layers.BIASES | layers.OUTPUT_BIAS | layers.UNGATED_BIASES).items()
}
FINAL = {
    name: replace(kind, module="model.final_layernorm") if name.startswith("output_norm") else kind
    for name, kind in layers.FINAL_WITH_BIAS.items()
} | {"output.bias": WeightKind(role="bias", shape=lambda h: (h.vocab,), module="lm_head")}

ARCHITECTURE = Architecture(
    name="phi2",
    keys=layers.LAYER_NORM_KEYS,
    weights=layers.EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | layers.BEFORE_ATTENTION_BIAS
    | layers.rename_modules(layers.ATTENTION | layers.UNGATED | BIASES, MODULES)
    | FINAL,
    rotation="halves",
    embed=layers.embed,
    block=partial(
        layers.parallel_block, norm=ForwardPass.layer_norm, transform=partial(layers.ungated, activation=gelu)
    ),
    final_norm=partial(layers.final_norm, norm=ForwardPass.layer_norm),
    partial_rotary=True,
    heads_fill_width=True,
    tied=False,
    supported_values=layers.SUPPORTED_VALUES,
)
