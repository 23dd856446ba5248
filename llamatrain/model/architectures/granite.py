"""Granite 3 and 4 (Granite Team 2024).

A llama with four multipliers: of embeddings, scores, blocks and logits.
"""

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
    "logit_scale": Key("logit_scale", float, min_value=1e-6),
}
ROTARY = {"rope.scaling.finetuned": (True, "a model without rotary embeddings")}
NEW_MODEL_VALUES = {"embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0}


def multiply(model: ForwardPass, x: Tensor, name: str) -> Tensor:
    """Multiply x by a hyperparameter; 0 means that there is no such multiplier."""
    by = model.h.extra[name]
    return O.scale(x, by=by) if by not in (0, 1) else x


def embed(model: ForwardPass) -> Tensor:
    """Return the token embeddings times their multiplier."""
    return multiply(model, model.embedding("token_embd"), "embedding_scale")


def block(
    model: ForwardPass, layer: int, x: Tensor, transform: layers.FeedForward = layers.feed_forward
) -> Tensor:
    """Return the output of a block whose halves are multiplied before they are added."""
    prefix = f"blk.{layer}"
    output = layers.attention(model, layer, model.norm(x, f"{prefix}.attn_norm"))
    x = O.add(model.keep_scored_rows(layer, x), multiply(model, output, "residual_scale"))
    output = transform(model, layer, model.norm(x, f"{prefix}.ffn_norm"))
    return O.add(x, multiply(model, output, "residual_scale"))


def final_norm(model: ForwardPass, x: Tensor) -> Tensor:
    """Return the final norm divided by the scale of the logits, which has the same effect."""
    return O.scale(model.norm(x, "output_norm"), by=1 / model.h.extra["logit_scale"])


def attention_mask(h: Hyperparameters, layer: int) -> AttentionMask:
    """Return a block's mask with the model's scale."""
    return AttentionMask(scale=h.extra["attention_scale"] or h.head_size**-0.5)


ARCHITECTURE = Architecture(
    name="granite",
    keys=layers.KEYS | KEYS,
    weights=layers.WEIGHTS | layers.MORE_BIASES,
    rotation="pairs",
    embed=embed,
    block=block,
    final_norm=final_norm,
    attention_mask=attention_mask,
    new_model_values=NEW_MODEL_VALUES,
    supported_values=layers.SUPPORTED_VALUES | ROTARY,
)
