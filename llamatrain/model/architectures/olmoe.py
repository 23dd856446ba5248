"""OLMoE (Muennighoff et al. 2024): norms of whole queries and keys, and a router and experts in each block.

The shares of experts are those of the softmax of all scores. The feed-forward width of a file is that of an expert.
"""

from llamatrain.graph import ops as O
from llamatrain.graph.tensor import Tensor
from llamatrain.model import experts, layers
from llamatrain.model.architecture import Architecture
from llamatrain.model.architectures import olmo2
from llamatrain.model.forward import ForwardPass


def block(model: ForwardPass, layer: int, x: Tensor) -> Tensor:
    """Return the output of a pre-norm block that norms queries and keys."""
    prefix = f"blk.{layer}"
    output = olmo2.attention(model, layer, model.norm(x, f"{prefix}.attn_norm"))
    x = O.add(model.keep_scored_rows(layer, x), output)
    return O.add(x, experts.feed_forward(model, layer, model.norm(x, f"{prefix}.ffn_norm")))


ARCHITECTURE = Architecture(
    name="olmoe",
    keys=experts.COUNT_KEYS | layers.KEYS,
    weights=layers.EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | layers.ATTENTION
    | olmo2.NORMS_OF_WHOLE_ROWS
    | layers.BEFORE_FEED_FORWARD
    | experts.ROUTER
    | experts.stacks(lambda h: h.ff)
    | layers.FINAL,
    rotation="halves",
    embed=layers.embed,
    block=block,
    final_norm=layers.final_norm,
    tied=False,
    heads_fill_width=True,
    check=experts.check,
    expert_has_ff=True,
    new_model_values=experts.NEW_MODEL_COUNTS,
    supported_values={
        "attention.causal": layers.SUPPORTED_VALUES["attention.causal"],
        "attention.clamp_kqv": (0.0, "a limit of queries, keys and values"),
    },
)
