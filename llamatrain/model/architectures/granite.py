"""Granite 3 and 4: a llama with four multipliers, of embeddings, scores, blocks and logits (Granite Team 2024)."""

from llamatrain.graph import ops as O
from llamatrain.graph.tensor import Tensor
from llamatrain.model import layers
from llamatrain.model.architecture import Architecture, AttentionMask, Key
from llamatrain.model.forward import ForwardPass
from llamatrain.model.hyperparameters import Hyperparameters

KEYS = {
    "embedding_scale": Key("embedding_scale", float, 0.0),
    "attention.scale": Key("attention_scale", float, 0.0),
    "residual_scale": Key("residual_scale", float, 0.0),
    "logit_scale": Key("logit_scale", float, least=1e-6),
}


def scaled(model: ForwardPass, x: Tensor, name: str) -> Tensor:
    """0 says that there is no such multiplier."""
    by = model.h.own[name]
    return O.scale(x, by=by) if by not in (0, 1) else x


def embed(model: ForwardPass) -> Tensor:
    return scaled(model, model.embedding("token_embd"), "embedding_scale")


def block(model: ForwardPass, layer: int, x: Tensor) -> Tensor:
    at = f"blk.{layer}"
    made = layers.attention(model, layer, model.norm(x, f"{at}.attn_norm"))
    x = O.add(model.going_on(layer, x), scaled(model, made, "residual_scale"))
    made = layers.feed_forward(model, layer, model.norm(x, f"{at}.ffn_norm"))
    return O.add(x, scaled(model, made, "residual_scale"))


def last(model: ForwardPass, x: Tensor) -> Tensor:
    """Logits are divided by their scale: here what they are made of is."""
    return O.scale(model.norm(x, "output_norm"), by=1 / model.h.own["logit_scale"])


def sight(h: Hyperparameters, layer: int) -> AttentionMask:
    return AttentionMask(scale=h.own["attention_scale"] or h.head_size**-0.5)


ARCHITECTURE = Architecture(
    name="granite",
    keys=layers.KEYS | KEYS,
    weights=layers.WEIGHTS | layers.MORE_BIASES,
    rotation="pairs",
    embed=embed,
    block=block,
    last=last,
    sight=sight,
    new={"embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0},
    refused=layers.REFUSED | {"rope.scaling.finetuned": (True, "a model whose heads do not turn")},
    relatives={
        "granitemoe": "a mixture of experts",
        "granitehybrid": "a hybrid, of attention and of blocks that recur",
    },
)
