"""StableLM 3B and StableLM 2 (Bellagente et al. 2024): a llama with layer norms and heads that rotate in part.

StableLM 2 12B has attention and feed-forward side by side, and norms each head of queries and keys with a weight
of its own. As in llama.cpp, the weights of a file tell this: a model whose blocks have one norm runs them side by side.
"""

from dataclasses import replace
from functools import partial

from llamatrain.graph.tensor import Tensor
from llamatrain.model import layers
from llamatrain.model.architecture import Architecture
from llamatrain.model.forward import ForwardPass

BEFORE_FEED_FORWARD = {
    name: replace(kind, optional=True)
    for name, kind in (layers.BEFORE_FEED_FORWARD | layers.BEFORE_FEED_FORWARD_BIAS).items()
}
NORMS_OF_EACH_HEAD = layers.rename_modules(
    layers.NORMS_OF_EACH_HEAD,
    {"attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"},
)


def block(model: ForwardPass, layer: int, x: Tensor) -> Tensor:
    """Return the output of a block; without a second norm, its two halves are side by side."""
    in_turn = f"blk.{layer}.ffn_norm.weight" in model.weights
    run = layers.block if in_turn else layers.parallel_block
    return run(model, layer, x, layers.norm_each_head, norm=ForwardPass.layer_norm)


ARCHITECTURE = Architecture(
    name="stablelm",
    keys=layers.LAYER_NORM_KEYS,
    weights=layers.EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | layers.BEFORE_ATTENTION_BIAS
    | layers.ATTENTION
    | layers.BIASES
    | NORMS_OF_EACH_HEAD
    | BEFORE_FEED_FORWARD
    | layers.FEED_FORWARD
    | layers.FINAL_WITH_BIAS,
    rotation="halves",
    embed=layers.embed,
    block=block,
    final_norm=partial(layers.final_norm, norm=ForwardPass.layer_norm),
    partial_rotary=True,
    heads_fill_width=True,
    tied=False,
    new_model_weights=frozenset(BEFORE_FEED_FORWARD),
    supported_values=layers.SUPPORTED_VALUES,
)
