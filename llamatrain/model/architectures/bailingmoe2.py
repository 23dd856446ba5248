"""Ling 2.0 and Ring 2.0 (Ling Team 2025): the experts of GLM 4.5, and one matrix for queries, keys and values.

Scores may be a softmax instead of sigmoids. The names of modules are those of the models' own code, which is no part of
Hugging Face's library.
"""

from dataclasses import replace
from functools import partial
from operator import itemgetter

from llamatrain.model import experts, layers
from llamatrain.model.architecture import Architecture
from llamatrain.model.architectures import glm4moe
from llamatrain.model.forward import ForwardPass

EMBEDDINGS = {name: replace(kind, module="model.word_embeddings") for name, kind in layers.EMBEDDINGS.items()}
ATTENTION = layers.rename_modules(
    layers.JOINED_ATTENTION | layers.HEAD_NORMS,
    {
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "attn_q_norm": "attention.query_layernorm",
        "attn_k_norm": "attention.key_layernorm",
    },
)
MIXTURE = experts.ROUTER | experts.EXPERTS | experts.score_bias("mlp.gate.expert_bias", optional=True)

ARCHITECTURE = Architecture(
    name="bailingmoe2",
    keys=glm4moe.KEYS | experts.SHARED_KEYS,
    weights=EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | ATTENTION
    | layers.BEFORE_FEED_FORWARD
    | layers.restrict_blocks(layers.FEED_FORWARD, experts.is_dense)
    | layers.restrict_blocks(MIXTURE, experts.is_mixture)
    | glm4moe.SHARED
    | layers.FINAL,
    rotation="halves",
    embed=layers.embed,
    block=partial(layers.block, norm_heads=ForwardPass.norm, transform=glm4moe.feed_forward),
    final_norm=layers.final_norm,
    tied=False,
    partial_rotary=True,
    heads_fill_width=True,
    is_kept=layers.is_extra,
    check=experts.check,
    new_model_values=glm4moe.NEW_MODEL_VALUES | {"shared_ff": itemgetter("expert_ff")},
    new_model_weights=frozenset({experts.SCORE_BIAS}),
    supported_values=layers.CAUSAL,
)
