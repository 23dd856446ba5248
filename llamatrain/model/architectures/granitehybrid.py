"""Granite 4 with Mamba blocks, without experts (Granite Team 2025): a granite in which most blocks have no attention.

They have the scan of Mamba 2 (Dao and Gu 2024), which is the gated delta rule without its correction. A block
has attention if it has key/value heads; most models do not rotate them.
"""

from dataclasses import replace
from functools import partial
from math import gcd

import numpy as np

from llamatrain.graph import ops as O
from llamatrain.graph.ops import silu, softplus, split_columns, swiglu
from llamatrain.graph.tensor import Tensor
from llamatrain.model import layers
from llamatrain.model.architecture import Architecture, Key, Shape
from llamatrain.model.architectures import granite, lfm2
from llamatrain.model.architectures.lfm2 import attends
from llamatrain.model.architectures.qwen35 import (
    channels,
    check,
    initial_decay,
    initial_step,
    key_width,
    rule_states,
    sized_by,
    value_size,
    width,
)
from llamatrain.model.forward import ForwardPass
from llamatrain.model.hyperparameters import Hyperparameters

HEAD_SIZE = 64  # of new models, if it divides their width
PERIOD = 4  # in new models, each fourth block has attention
KEY_COPIES = 8  # of the keys of a single group, so that several threads can share its heads
KEYS = {
    "ssm.conv_kernel": Key("taps", int, 4, min_value=2),
    "ssm.state_size": Key("key_size", int, 128, min_value=1),
    "ssm.group_count": Key("key_heads", int, 1, min_value=1),
    "ssm.inner_size": Key("value_width", int, min_value=1),
    "ssm.time_step_rank": Key("value_heads", int, min_value=1),
}
NEW_SCAN = {  # sizes of new models
    "value_width": lambda sizes: 2 * sizes["embd"],
    "value_heads": lambda sizes: 2 * sizes["embd"] // gcd(2 * sizes["embd"], HEAD_SIZE),
}


def scans(h: Hyperparameters, layer: int) -> bool:
    """Return True if a block has a scan."""
    return not attends(h, layer)


# ---- weights ----------------------------------------------------------------


def head_vector(module: str, **facts: object) -> layers.Weight:
    """Return a weight with one number for each head, in rows of one as files have it."""
    return layers.block_weight("bias", lambda h: (int(h.extra["value_heads"]), 1), module, **facts)


def norm_shape(h: Hyperparameters) -> Shape:
    """Return the shape of the norm's weight: a row for each group."""
    groups = int(h.extra["key_heads"])
    return groups, int(h.extra["value_width"]) // groups


def ones(generator: np.random.Generator, shape: Shape) -> np.ndarray:
    """Return ones."""
    return np.ones(shape)


SCAN: dict[str, layers.Weight] = {
    "blk.{}.ssm_in.weight": layers.block_matrix(
        lambda h: int(h.extra["value_width"]) + channels(h) + int(h.extra["value_heads"]),
        width,
        "mamba.in_proj",
    ),
    "blk.{}.ssm_conv1d.weight": layers.block_taps(channels, "mamba.conv1d"),
    "blk.{}.ssm_conv1d.bias": layers.block_vector("bias", channels, "mamba.conv1d"),
    "blk.{}.ssm_dt.bias": layers.block_vector(
        "bias", sized_by("value_heads"), "mamba.dt_bias", initial=initial_step
    ),
    "blk.{}.ssm_a": head_vector("mamba.A_log", initial=initial_decay, trained_as_log=True),
    "blk.{}.ssm_d": head_vector("mamba.D", initial=ones),
    "blk.{}.ssm_norm.weight": layers.block_weight("norm", norm_shape, "mamba.norm"),
    "blk.{}.ssm_out.weight": layers.block_matrix(
        width, sized_by("value_width"), "mamba.out_proj", residual=True
    ),
}
MODULES = {"ffn_gate": "shared_mlp.input_linear", "ffn_up": "shared_mlp.input_linear"}
MODULES |= {"ffn_down": "shared_mlp.output_linear"}
FEED_FORWARD = layers.rename_modules(layers.FEED_FORWARD, MODULES)
FEED_FORWARD |= {
    f"blk.{{}}.{name}.weight": replace(FEED_FORWARD[f"blk.{{}}.{name}.weight"], part=(number, 2))
    for number, name in enumerate(("ffn_gate", "ffn_up"))
}


# ---- blocks -----------------------------------------------------------------


def spread_keys(model: ForwardPass, x: Tensor) -> Tensor:
    """Repeat rows of keys or queries so that value head h reads the key head h modulo their number.

    The heads of a group are neighbors. Keys of a single group are repeated a few times only.
    """
    groups, heads, size = (int(model.h.extra[name]) for name in ("key_heads", "value_heads", "key_size"))
    copies = gcd(heads, KEY_COPIES) if groups == 1 else heads // groups
    grid = model.tokens.shape
    repeated = O.repeat(O.reshape(x, shape=(*grid, groups, 1, size)), shape=(*grid, groups, copies, size))
    return O.reshape(repeated, shape=(*grid, groups * copies, size))


def scan(model: ForwardPass, layer: int, y: Tensor) -> Tensor:
    """Return the output of a scan: a convolution, the linear attention, and a gate before a norm."""
    h, prefix, grid, rows = model.h, f"blk.{layer}", model.tokens.shape, model.tokens.size
    heads, inner = int(h.extra["value_heads"]), int(h.extra["value_width"])
    gate, mixed, steps = split_columns(model.linear(y, f"{prefix}.ssm_in"), sizes=(inner, channels(h), heads))
    mixed = model.recurrence.convolve(
        layer, O.reshape(mixed, shape=(*grid, channels(h))), model.weights[f"{prefix}.ssm_conv1d.weight"]
    )
    mixed = O.reshape(mixed, shape=(rows, channels(h)))
    mixed = silu(O.add(mixed, model.weights[f"{prefix}.ssm_conv1d.bias"]))
    values, keys, queries = split_columns(mixed, sizes=(inner, key_width(h), key_width(h)))
    k, q = spread_keys(model, keys), spread_keys(model, queries)
    values = O.reshape(values, shape=(*grid, heads, value_size(h)))
    steps = softplus(O.add(steps, model.weights[f"{prefix}.ssm_dt.bias"]))
    decay = O.mul(steps, O.reshape(model.weights[f"{prefix}.ssm_a"], shape=(heads,)))
    steps, decay = (O.reshape(each, shape=(*grid, heads)) for each in (steps, decay))
    output = model.recurrence.delta_rule(layer, q, k, values, decay, steps, False)
    output = O.add(output, O.mul(values, model.weights[f"{prefix}.ssm_d"]))
    gated = swiglu(gate, O.reshape(output, shape=(rows, inner)))
    normed = group_norm(model, gated, f"{prefix}.ssm_norm.weight")
    return model.linear(model.keep_scored_rows(layer, normed), f"{prefix}.ssm_out")


def group_norm(model: ForwardPass, x: Tensor, name: str) -> Tensor:
    """Return x with each group of a row normed by itself; x itself if the model has no such norm."""
    if name not in model.weights:
        return x
    weight = model.weights.norm_weight(name)
    grouped = O.reshape(x, shape=(x.shape[0], *weight.shape))
    return O.reshape(O.mul(model.norm_without_weight(grouped), weight), shape=x.shape)


def block(model: ForwardPass, layer: int, x: Tensor) -> Tensor:
    """Return the output of a block: attention or a scan, and a feed-forward part."""
    prefix = f"blk.{layer}"
    mix = layers.attention if attends(model.h, layer) else scan
    output = mix(model, layer, model.norm(x, f"{prefix}.attn_norm"))
    x = O.add(model.keep_scored_rows(layer, x), granite.multiply(model, output, "residual_scale"))
    output = layers.feed_forward(model, layer, model.norm(x, f"{prefix}.ffn_norm"))
    return O.add(x, granite.multiply(model, output, "residual_scale"))


def states(h: Hyperparameters, layer: int) -> dict[str, Shape]:
    """Return the state that a block keeps while decoding."""
    return {} if attends(h, layer) else rule_states(h)


def rope_index(h: Hyperparameters, layer: int) -> int | None:
    """Return the only rotation, or None if the model has none."""
    return 0 if h.extra["rotates"] else None


ARCHITECTURE = Architecture(
    name="granitehybrid",
    keys=layers.KEYS | granite.KEYS | KEYS | {"rope.scaling.finetuned": Key("rotates", bool, False)},
    weights=layers.EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | layers.restrict_blocks(SCAN, scans)
    | layers.restrict_blocks(layers.ATTENTION | layers.BIASES | layers.OUTPUT_BIAS, attends)
    | layers.BEFORE_FEED_FORWARD
    | FEED_FORWARD
    | layers.FINAL,
    rotation="pairs",
    embed=granite.embed,
    block=block,
    final_norm=granite.final_norm,
    attention_mask=granite.attention_mask,
    rope_index=rope_index,
    ties_by_default=True,
    attends=attends,
    states=states,
    check=check,
    shifts_context=False,
    new_model_blocks=partial(lfm2.new_model_blocks, period=PERIOD),
    new_model_values={**granite.NEW_MODEL_VALUES, **NEW_SCAN},
    supported_values=layers.SUPPORTED_VALUES,
)
