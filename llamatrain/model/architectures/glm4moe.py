"""GLM 4.5 and 4.6 (GLM Team 2025): all blocks but the first few have experts, one more of which all tokens use.

Scores are sigmoids. A bias that balances the experts is added to choose them, and is no part of their shares. Blocks that
predict several tokens lie behind the others; they are kept as they are, and not trained.
"""

from dataclasses import replace
from functools import partial

from llamatrain.graph.tensor import Tensor
from llamatrain.model import experts, layers
from llamatrain.model.architecture import Architecture
from llamatrain.model.forward import ForwardPass

HEAD_NORMS = {name: replace(kind, optional=True) for name, kind in layers.HEAD_NORMS.items()}
MIXTURE = (
    experts.ROUTER | experts.EXPERTS | experts.score_bias("mlp.gate.e_score_correction_bias", optional=True)
)
SHARED = experts.shared_expert(experts.shared_modules("mlp.shared_experts"))
KEYS = (
    experts.KEYS
    | layers.KEYS
    | layers.BLOCK_KEYS
    | experts.DENSE_KEYS
    | experts.SHARED_COUNT_KEYS
    | experts.SIGMOID_KEYS
    | experts.ROUTING_KEYS
)
NEW_MODEL_VALUES = experts.NEW_MODEL_VALUES | {
    "dense_blocks": 1,
    "shared_count": 1,
    "normalizes_shares": True,
}


def norm_heads(model: ForwardPass, heads: Tensor, name: str) -> Tensor:
    """Return the norms of heads; the heads as they are if the model norms none."""
    return model.norm(heads, name) if f"{name}.weight" in model.weights else heads


def feed_forward(model: ForwardPass, layer: int, y: Tensor) -> Tensor:
    """Return the output of the experts, or of the feed-forward part of a dense block."""
    return experts.mixed_feed_forward(model, layer, y, experts.routing_of(model.h))


ARCHITECTURE = Architecture(
    name="glm4moe",
    keys=KEYS,
    weights=layers.EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | layers.ATTENTION
    | layers.BIASES
    | HEAD_NORMS
    | layers.POST_ATTENTION_NORM
    | layers.restrict_blocks(layers.FEED_FORWARD, experts.is_dense)
    | layers.restrict_blocks(MIXTURE, experts.is_mixture)
    | SHARED
    | layers.FINAL,
    rotation="halves",
    embed=layers.embed,
    block=partial(
        layers.block, norm_heads=norm_heads, ffn_norm="post_attention_norm", transform=feed_forward
    ),
    final_norm=layers.final_norm,
    partial_rotary=True,
    is_kept=layers.is_extra,
    check=experts.check,
    new_model_values=NEW_MODEL_VALUES,
    new_model_weights=frozenset({experts.SCORE_BIAS, *HEAD_NORMS}),
    supported_values=layers.CAUSAL | {"rope.dimension_sections": (0, "a vision-language model")},
)
