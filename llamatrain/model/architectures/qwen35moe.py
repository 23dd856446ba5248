"""Qwen 3.5 and 3.6 with experts (Qwen Team 2026): a qwen35 with a router and experts in each block.

One more expert is used by all tokens; a sigmoid of a score of its own multiplies what it gives.
"""

from functools import partial
from operator import itemgetter

from llamatrain.model import experts, layers
from llamatrain.model.architecture import Architecture
from llamatrain.model.architectures import qwen35
from llamatrain.model.architectures.qwen2vl import SECTIONS
from llamatrain.model.hyperparameters import Hyperparameters

MIXTURE = (
    experts.ROUTER
    | experts.joinable_stacks(experts.count("expert_ff"))
    | experts.SHARED_GATE
    | experts.shared_expert(experts.SHARED_MODULES)
)
feed_forward = partial(experts.feed_forward_with_shared, routing=experts.Routing(normalized=True))


def check(h: Hyperparameters) -> None:
    """Raise BadHyperparameter if the sizes of heads or the numbers of experts do not fit together."""
    qwen35.check(h)
    experts.check(h)


ARCHITECTURE = Architecture(
    name="qwen35moe",
    keys=experts.KEYS | layers.KEYS | experts.FEED_FORWARD_LENGTH | qwen35.KEYS | experts.ALWAYS_SHARED_KEYS,
    lists=SECTIONS,
    weights=layers.EMBEDDINGS | qwen35.MIXERS | MIXTURE | layers.FINAL,
    rotation="halves",
    embed=layers.embed,
    block=partial(qwen35.block, transform=feed_forward),
    final_norm=layers.final_norm,
    partial_rotary=True,
    attends=qwen35.attends,
    states=qwen35.states,
    check=check,
    is_kept=layers.is_extra,
    shifts_context=False,
    new_model_values=experts.NEW_MODEL_VALUES | {"shared_ff": itemgetter("expert_ff")},
    supported_values=layers.CAUSAL,
)
