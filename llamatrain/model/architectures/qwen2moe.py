"""Qwen 1.5 and 2 with mixtures of experts (Yang et al. 2024): a qwen2 with a router and experts in each block.

The shares of experts are those of the softmax of all scores. One more expert is used by all tokens; a sigmoid of a
score of its own multiplies what it gives.
"""

from functools import partial
from operator import itemgetter

from llamatrain.model import experts, layers
from llamatrain.model.architecture import Architecture
from llamatrain.model.architectures.qwen2 import BIASES

ARCHITECTURE = Architecture(
    name="qwen2moe",
    keys=experts.KEYS | layers.KEYS | experts.FEED_FORWARD_LENGTH | experts.ALWAYS_SHARED_KEYS,
    weights=layers.EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | layers.ATTENTION
    | BIASES
    | layers.BEFORE_FEED_FORWARD
    | experts.ROUTER
    | experts.EXPERTS
    | experts.SHARED_GATE
    | experts.shared_expert(experts.SHARED_MODULES)
    | layers.FINAL,
    rotation="halves",
    embed=layers.embed,
    block=partial(layers.block, transform=experts.feed_forward_with_shared),
    final_norm=layers.final_norm,
    heads_fill_width=True,
    check=experts.check,
    new_model_values=experts.NEW_MODEL_VALUES | {"shared_ff": itemgetter("expert_ff")},
    supported_values=layers.CAUSAL,
)
