"""Command R, Command R+ and Aya (Cohere 2024): attention and feed-forward side by side, and scaled logits.

Layer norms have no biases; Command R+ also norms each head of queries and keys with a weight of its own. All heads
rotate in pairs, in Hugging Face's library too.
"""

from dataclasses import replace
from functools import partial

from llamatrain.graph import ops as O
from llamatrain.graph.tensor import Tensor
from llamatrain.model import layers
from llamatrain.model.architecture import Architecture, Key
from llamatrain.model.forward import ForwardPass

KEYS = {"logit_scale": Key("logit_scale", float, min_value=1e-6)}
WEIGHTS = (
    layers.EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | {name: replace(kind, rotary_heads=None) for name, kind in layers.ATTENTION.items()}
    | layers.BIASES
    | layers.NORMS_OF_EACH_HEAD
    | layers.FEED_FORWARD
    | layers.FINAL
)


def final_norm(model: ForwardPass, x: Tensor) -> Tensor:
    """Return the final norm times the scale of the logits, which has the same effect."""
    return O.scale(model.layer_norm(x, "output_norm"), by=model.h.extra["logit_scale"])


ARCHITECTURE = Architecture(
    name="command-r",
    keys=layers.LAYER_NORM_KEYS | KEYS,
    weights=WEIGHTS,
    rotation="pairs",
    embed=layers.embed,
    block=partial(layers.parallel_block, norm_heads=layers.norm_each_head, norm=ForwardPass.layer_norm),
    final_norm=final_norm,
    heads_fill_width=True,
    tied=True,
    ties_by_default=True,
    new_model_values={"logit_scale": 1.0},
    supported_values=layers.SUPPORTED_VALUES,
)
