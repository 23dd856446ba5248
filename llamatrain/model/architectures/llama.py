"""Llama 1, 2 and 3, and models built like them: TinyLlama, Mistral, SmolLM (Touvron et al. 2023).

A file with experts is a Mixtral (Jiang et al. 2024): all blocks have a router and experts instead of one
feed-forward part, and the feed-forward width is that of an expert.
"""

from functools import partial

from llamatrain.graph.tensor import Tensor
from llamatrain.model import experts, layers
from llamatrain.model.architecture import Architecture
from llamatrain.model.forward import ForwardPass
from llamatrain.model.hyperparameters import Hyperparameters

UNSUPPORTED = {  # architectures that are not supported, by kind
    "a mixture of experts": "llama4 deepseek grok dbrx arctic bailingmoe dots1 minimax-m2",
    "a recurrent model": "mamba mamba2 rwkv6 rwkv7 arwkv7 rwkv6qwen2",
    "a hybrid of attention and recurrent blocks": "jamba plamo2 kimi-linear",
    "an embedding model": "bert modern-bert nomic-bert jina-bert-v2 llama-embed",
    "an encoder-decoder model": "t5",
    "a model whose layers differ in shape": "deci openelm",
}

COUNT_KEYS = {key: experts.OPTIONAL_KEYS[key] for key in experts.COUNT_KEYS}
ROUTING = experts.Routing(normalized=True)


def is_dense(h: Hyperparameters, layer: int) -> bool:
    """Return True if a block has one feed-forward part."""
    return not experts.has_experts(h, layer)


def feed_forward(model: ForwardPass, layer: int, y: Tensor) -> Tensor:
    """Return the output of the feed-forward part, or of the experts."""
    if is_dense(model.h, layer):
        return layers.feed_forward(model, layer, y)
    return experts.feed_forward(model, layer, y, routing=ROUTING)


ARCHITECTURE = Architecture(
    name="llama",
    keys=COUNT_KEYS | layers.KEYS,
    weights=layers.EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | layers.ATTENTION
    | layers.BIASES
    | layers.BEFORE_FEED_FORWARD
    | layers.restrict_blocks(layers.FEED_FORWARD, is_dense)
    | layers.restrict_blocks(experts.ROUTER | experts.stacks(lambda h: h.ff), experts.has_experts)
    | layers.FINAL
    | layers.MORE_BIASES,
    rotation="pairs",
    embed=layers.embed,
    block=partial(layers.block, transform=feed_forward),
    final_norm=layers.final_norm,
    partial_rotary=True,
    check=experts.check_optional,
    supported_values=layers.CAUSAL,
    unsupported_names={name: what for what, names in UNSUPPORTED.items() for name in names.split()},
)
