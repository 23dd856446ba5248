"""Qwen 3 with mixtures of experts (Yang et al. 2025): the blocks of Qwen 3 with a router and experts in each."""

from functools import partial

from llamatrain.model import experts, layers
from llamatrain.model.architecture import Architecture
from llamatrain.model.forward import ForwardPass

ARCHITECTURE = Architecture(
    name="qwen3moe",
    keys=experts.KEYS | layers.KEYS | experts.FEED_FORWARD_LENGTH,
    weights=layers.EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | layers.ATTENTION
    | layers.HEAD_NORMS
    | layers.BEFORE_FEED_FORWARD
    | experts.ROUTER
    | experts.EXPERTS
    | layers.FINAL,
    rotation="halves",
    embed=layers.embed,
    block=partial(
        layers.block,
        norm_heads=ForwardPass.norm,
        transform=partial(experts.feed_forward, routing=experts.Routing(normalized=True)),
    ),
    final_norm=layers.final_norm,
    check=experts.check,
    new_model_values=experts.NEW_MODEL_VALUES,
    supported_values=layers.CAUSAL,
)
