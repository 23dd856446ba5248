"""Apertus (Project Apertus 2025): a llama with normed heads and xIELU, which has numbers of its own in each block."""

from functools import partial

import numpy as np

from llamatrain.graph.ops import xielu
from llamatrain.graph.tensor import Tensor
from llamatrain.model import layers
from llamatrain.model.architecture import Architecture, NumberList
from llamatrain.model.forward import ForwardPass

BETA, EPS, SLOPE = 0.5, -1e-6, 0.8  # of a new model: xIELU is about SLOPE x² on both sides of 0


def number_list(field: str, initial: float) -> NumberList:
    """Return a list of one number for each block, which has no prefix in files."""
    return NumberList(
        field=field, kind=float, initial=lambda layers, head_size: (initial,) * layers, has_prefix=False
    )


def softplus_inverse(x: float) -> float:
    """Return the number whose softplus is x."""
    return float(np.log(np.expm1(x)))


def transform(model: ForwardPass, layer: int, y: Tensor) -> Tensor:
    """Return down(xielu(up(y))) with the block's numbers. Files have those of which softplus makes the factors."""
    numbers = {name: values[layer] for name, values in model.h.lists.items()}
    beta = numbers["beta"]
    activation = partial(
        xielu,
        positive=float(np.logaddexp(0.0, numbers["alpha_p"])),
        negative=beta + float(np.logaddexp(0.0, numbers["alpha_n"])),
        beta=beta,
        eps=numbers["eps"],
    )
    return layers.ungated(model, layer, y, activation)


ARCHITECTURE = Architecture(
    name="apertus",
    keys=layers.KEYS,
    weights=layers.EMBEDDINGS
    | {"blk.{}.attn_norm.weight": layers.block_norm("attention_layernorm")}
    | layers.ATTENTION
    | layers.BIASES
    | layers.OUTPUT_BIAS
    | layers.HEAD_NORMS
    | {"blk.{}.ffn_norm.weight": layers.block_norm("feedforward_layernorm")}
    | layers.UNGATED
    | layers.FINAL,
    rotation="halves",
    lists={
        "xielu.alpha_p": number_list("alpha_p", softplus_inverse(SLOPE)),
        "xielu.alpha_n": number_list("alpha_n", softplus_inverse(SLOPE - BETA)),
        "xielu.beta": number_list("beta", BETA),
        "xielu.eps": number_list("eps", EPS),
    },
    embed=layers.embed,
    block=partial(layers.block, norm_heads=ForwardPass.norm, transform=transform),
    final_norm=layers.final_norm,
    tied=False,
    supported_values=layers.SUPPORTED_VALUES,
)
