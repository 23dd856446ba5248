"""Granite 3 with experts (Granite Team 2024): a granite with a router and experts in each block.

Some models also have an expert that all tokens use. The feed-forward width of a file is that of a routed expert.
"""

from functools import partial

from llamatrain.model import experts, layers
from llamatrain.model.architecture import Architecture
from llamatrain.model.architectures import granite

ROUTING = experts.Routing(normalized=True)
MIXTURE = experts.router("block_sparse_moe.router") | experts.stacks(
    lambda h: h.ff, "block_sparse_moe.experts"
)
MODULES = dict.fromkeys(("ffn_gate", "ffn_up"), "shared_mlp.input_linear")
MODULES |= {"ffn_down": "shared_mlp.output_linear"}

ARCHITECTURE = Architecture(
    name="granitemoe",
    keys=experts.COUNT_KEYS | layers.KEYS | granite.KEYS | experts.SHARED_KEYS,
    weights=layers.EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | layers.ATTENTION
    | layers.BIASES
    | layers.OUTPUT_BIAS
    | layers.BEFORE_FEED_FORWARD
    | MIXTURE
    | experts.shared_expert(MODULES)
    | layers.FINAL,
    rotation="pairs",
    embed=granite.embed,
    block=partial(granite.block, transform=partial(experts.mixed_feed_forward, routing=ROUTING)),
    final_norm=granite.final_norm,
    attention_mask=granite.attention_mask,
    check=experts.check,
    expert_has_ff=True,
    new_model_values={**granite.NEW_MODEL_VALUES, **experts.NEW_MODEL_COUNTS},
    supported_values=layers.CAUSAL | granite.ROTARY,
)
