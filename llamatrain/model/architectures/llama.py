"""Llama 1, 2 and 3, and models built like them: TinyLlama, Mistral, SmolLM (Touvron et al. 2023)."""

from llamatrain.model import layers
from llamatrain.model.architecture import Architecture

UNSUPPORTED = {  # architectures that are not supported, by kind
    "a mixture of experts": "llama4 deepseek deepseek2 grok dbrx arctic bailingmoe dots1 minimax-m2 smallthinker",
    "a recurrent model": "mamba mamba2 rwkv6 rwkv7 arwkv7 rwkv6qwen2",
    "a hybrid of attention and recurrent blocks": "jamba plamo2 kimi-linear",
    "an embedding model": "bert modern-bert nomic-bert jina-bert-v2 llama-embed",
    "an encoder-decoder model": "t5",
    "a model whose layers differ in shape": "deci openelm",
}

ARCHITECTURE = Architecture(
    name="llama",
    keys=layers.KEYS,
    weights=layers.WEIGHTS | layers.MORE_BIASES,
    rotation="pairs",
    embed=layers.embed,
    block=layers.block,
    final_norm=layers.final_norm,
    partial_rotary=True,
    supported_values=layers.SUPPORTED_VALUES,
    unsupported_names={name: what for what, names in UNSUPPORTED.items() for name in names.split()},
)
