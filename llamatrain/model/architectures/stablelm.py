"""StableLM 3B and StableLM 2 1.6B (Bellagente et al. 2024): a llama with layer norms and heads that rotate in part."""

from functools import partial

from llamatrain.model import layers
from llamatrain.model.architecture import Architecture
from llamatrain.model.forward import ForwardPass

ARCHITECTURE = Architecture(
    name="stablelm",
    keys=layers.LAYER_NORM_KEYS,
    weights=layers.EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | layers.BEFORE_ATTENTION_BIAS
    | layers.ATTENTION
    | layers.BIASES
    | layers.BEFORE_FEED_FORWARD
    | layers.BEFORE_FEED_FORWARD_BIAS
    | layers.FEED_FORWARD
    | layers.FINAL_WITH_BIAS,
    rotation="halves",
    embed=layers.embed,
    block=partial(layers.block, norm=ForwardPass.layer_norm),
    final_norm=partial(layers.final_norm, norm=ForwardPass.layer_norm),
    partial_rotary=True,
    heads_fill_width=True,
    tied=False,
    supported_values=layers.SUPPORTED_VALUES,
)
