"""Nemotron 4 and Minitron (Nvidia 2024): layer norms, a squared ReLU without a gate, and heads that rotate in part.

Files have the weights of norms as they are used; Hugging Face's are less by 1.
"""

from functools import partial

from llamatrain.model import layers
from llamatrain.model.architecture import Architecture
from llamatrain.model.forward import ForwardPass

ARCHITECTURE = Architecture(
    name="nemotron",
    keys=layers.LAYER_NORM_KEYS,
    weights=layers.EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | layers.BEFORE_ATTENTION_BIAS
    | layers.ATTENTION
    | layers.BIASES
    | layers.OUTPUT_BIAS
    | layers.BEFORE_FEED_FORWARD
    | layers.BEFORE_FEED_FORWARD_BIAS
    | layers.UNGATED
    | layers.UNGATED_BIASES
    | layers.FINAL_WITH_BIAS,
    rotation="halves",
    embed=layers.embed,
    block=partial(layers.block, norm=ForwardPass.layer_norm, transform=layers.ungated),
    final_norm=partial(layers.final_norm, norm=ForwardPass.layer_norm),
    partial_rotary=True,
    tied=False,
    supported_values=layers.SUPPORTED_VALUES,
    unsupported_names={
        "nemotron_h": "a hybrid of attention and recurrent blocks",
        "nemotron_h_moe": "a hybrid mixture of experts with recurrent blocks",
    },
)
