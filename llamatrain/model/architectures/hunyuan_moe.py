"""Hunyuan with experts (Tencent 2025): a hunyuan-dense with a router and experts in each block.

One more expert is used by all tokens. All experts have the feed-forward width of the file, as in llama.cpp.
"""

from functools import partial
from operator import itemgetter

from llamatrain.model import experts, layers
from llamatrain.model.architecture import Architecture, Key
from llamatrain.model.architectures import hunyuan_dense

# llama.cpp requires the key, and reads the other
EXPERT_KEYS = {"expert_feed_forward_length": Key("ff", int, lambda known: known["ff"])}
MIXTURE = experts.router("mlp.gate.wg", is_linear=True) | experts.stacks(lambda h: h.ff)

ARCHITECTURE = Architecture(
    name="hunyuan-moe",
    keys=experts.COUNT_KEYS | layers.KEYS | EXPERT_KEYS | experts.ALWAYS_SHARED_KEYS,
    weights=layers.EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | layers.ATTENTION
    | layers.BIASES
    | hunyuan_dense.HEAD_NORMS
    | layers.BEFORE_FEED_FORWARD
    | MIXTURE
    | experts.shared_expert(experts.shared_modules("mlp.shared_mlp"))
    | layers.FINAL,
    rotation="halves",
    embed=layers.embed,
    block=partial(
        hunyuan_dense.block,
        transform=partial(experts.mixed_feed_forward, routing=experts.Routing(normalized=True)),
    ),
    final_norm=layers.final_norm,
    check=experts.check,
    expert_has_ff=True,
    new_model_values=experts.NEW_MODEL_COUNTS | {"shared_ff": itemgetter("expert_ff")},
    supported_values=layers.CAUSAL,
)
