"""Llama 1, 2 and 3, and models built like them: TinyLlama, Mistral, SmolLM (Touvron et al. 2023)."""

from llamatrain.model import layers
from llamatrain.model.architecture import Architecture

UNSUPPORTED = {  # architectures that are not supported, by kind
    "a mixture of experts": "llama4 deepseek deepseek2 gpt-oss grok dbrx arctic bailingmoe dots1 glm4moe minimax-m2 smallthinker",
    "a model that recurs": "mamba mamba2 rwkv6 rwkv7 arwkv7 rwkv6qwen2",
    "a hybrid, of attention and of blocks that recur": "jamba nemotron_h falcon-h1 lfm2 plamo2 kimi-linear",
    "a model for embeddings": "bert modern-bert nomic-bert jina-bert-v2 llama-embed",
    "an encoder with a decoder": "t5",
    "a model whose scores depend on where tokens stand": "mistral3 mistral4",
    "a model whose blocks differ": "deci openelm",
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
