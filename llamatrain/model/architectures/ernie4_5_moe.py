"""ERNIE 4.5 with experts (Baidu 2025): an ernie4_5 in which all blocks but the first few have experts.

A bias that balances the experts is added to the softmax of scores to choose them, and is no part of their shares. One
more expert may be used by all tokens.
"""

from functools import partial
from operator import itemgetter

from llamatrain.model import experts, layers
from llamatrain.model.architecture import Architecture, Key
from llamatrain.model.architectures import ernie4_5
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.limits import BadHyperparameter

# every how many blocks have experts; llama.cpp requires the key
INTERVAL = {"interleave_moe_layer_step": Key("expert_interval", int, 1, min_value=1)}
MIXTURE = (
    experts.ROUTER
    | experts.EXPERTS
    | experts.score_bias("mlp.gate.moe_statics.e_score_correction_bias", optional=True)
)
SHARED = experts.shared_expert(experts.shared_modules("mlp.shared_experts"))


def check(h: Hyperparameters) -> None:
    """Raise BadHyperparameter if the numbers of experts do not fit together, or only some later blocks have them."""
    experts.check(h)
    if h.extra["expert_interval"] != 1:
        raise BadHyperparameter("expert_interval", f"{h.extra['expert_interval']}", "must be 1")


ARCHITECTURE = Architecture(
    name="ernie4_5-moe",
    keys=experts.KEYS | layers.KEYS | experts.DENSE_KEYS | INTERVAL | experts.SHARED_KEYS,
    weights=layers.EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | ernie4_5.ATTENTION
    | layers.BIASES
    | layers.BEFORE_FEED_FORWARD
    | layers.restrict_blocks(layers.FEED_FORWARD, experts.is_dense)
    | layers.restrict_blocks(MIXTURE, experts.is_mixture)
    | SHARED
    | layers.FINAL,
    rotation="pairs",
    embed=layers.embed,
    block=partial(
        layers.block,
        transform=partial(experts.mixed_feed_forward, routing=experts.Routing(normalized=True)),
    ),
    final_norm=layers.final_norm,
    check=check,
    new_model_values=experts.NEW_MODEL_VALUES | {"dense_blocks": 1, "shared_ff": itemgetter("expert_ff")},
    new_model_weights=frozenset({experts.SCORE_BIAS}),
    supported_values=layers.CAUSAL,
)
