"""Gemma 3 (Gemma Team 2025).

Gemma 2 with normed heads instead of capped scores, and windows in five of six blocks, whose heads rotate with
their own base.
"""

from collections.abc import Sequence
from functools import partial

from llamatrain.model import layers
from llamatrain.model.architecture import Architecture, Key, WindowPattern
from llamatrain.model.architectures import gemma2
from llamatrain.model.forward import ForwardPass
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.rope import Rope

KEYS = {
    "attention.sliding_window": Key("window", int, 0),
    "attention.sliding_window_pattern": WindowPattern("period", int, 6),
    "rope.freq_base_swa": Key("near_base", float, 10000.0, min_value=1),
    "final_logit_softcapping": Key("logit_cap", float, 0.0),
}
LAYERS_27B = 62  # layers of the 27B model


def ropes(h: Hyperparameters) -> Sequence[Rope]:
    """Return the rotations: scaling applies only to blocks without a window, the length factor to all."""
    return (
        [h.rope, Rope(h.rope.size, base=h.extra["near_base"], length=h.rope.length)]
        if h.extra["window"]
        else [h.rope]
    )


ARCHITECTURE = Architecture(
    name="gemma3",
    keys=layers.KEYS | KEYS,
    weights=layers.EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | layers.ATTENTION
    | layers.BIASES
    | layers.HEAD_NORMS
    | gemma2.AFTER_ATTENTION
    | gemma2.BEFORE_FEED_FORWARD
    | layers.FEED_FORWARD
    | gemma2.AFTER_FEED_FORWARD
    | layers.FINAL,
    rotation="halves",
    embed=gemma2.embed,
    block=partial(gemma2.block, norm_heads=ForwardPass.norm),
    final_norm=layers.final_norm,
    partial_rotary=True,
    ropes=ropes,
    rope_index=gemma2.rope_index,
    attention_mask=partial(gemma2.attention_mask, layers_27b=LAYERS_27B),
    logit_cap=gemma2.logit_cap,
    ties_by_default=True,
    new_model_values={"window": 512},
    supported_values=layers.SUPPORTED_VALUES,
)
