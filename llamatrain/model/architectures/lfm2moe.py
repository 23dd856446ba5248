"""LFM 2 with experts (Liquid AI 2025): all blocks but the first few have experts.

Scores are sigmoids. A bias that balances the experts is added to choose them, and is no part of their shares.
"""

from functools import partial

from llamatrain.graph.tensor import Tensor
from llamatrain.model import experts, layers
from llamatrain.model.architecture import Architecture
from llamatrain.model.architectures import lfm2
from llamatrain.model.forward import ForwardPass

MIXTURE = (
    experts.router("feed_forward.gate")
    | experts.stacks(experts.count("expert_ff"), "feed_forward.experts")
    | experts.score_bias("feed_forward.expert_bias")
)


def feed_forward(model: ForwardPass, layer: int, y: Tensor) -> Tensor:
    """Return the output of the feed-forward part, or of the experts."""
    return experts.mixed_feed_forward(model, layer, y, experts.gating_of(model.h, normalized=True))


ARCHITECTURE = Architecture(
    name="lfm2moe",
    keys=experts.KEYS | layers.KEYS | lfm2.KEYS | experts.DENSE_KEYS | experts.SIGMOID_KEYS,
    weights=layers.EMBEDDINGS
    | lfm2.MIXERS
    | layers.restrict_blocks(lfm2.FEED_FORWARD, experts.is_dense)
    | layers.restrict_blocks(MIXTURE, experts.is_mixture)
    | lfm2.FINAL,
    rotation="halves",
    embed=layers.embed,
    block=partial(lfm2.block, transform=feed_forward),
    final_norm=lfm2.final_norm,
    heads_fill_width=True,
    ties_by_default=True,
    attends=lfm2.attends,
    states=lfm2.states,
    check=experts.check,
    shifts_context=False,
    new_model_blocks=lfm2.new_model_blocks,
    new_model_values=experts.NEW_MODEL_VALUES | {"dense_blocks": 1},
    supported_values=layers.CAUSAL,
)
