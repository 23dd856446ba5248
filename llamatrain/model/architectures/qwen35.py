"""Qwen 3.5 and 3.6 (Qwen Team 2026): three of four blocks have a gated delta net instead of attention.

Yang et al., Gated Delta Networks (2024). Attention blocks have normed heads, of which a part rotates, and a
gate for their output. Files of models with vision have the same text part. Blocks that predict several tokens
lie behind the others; they are kept as they are, and not trained.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple

import numpy as np

from llamatrain.errors import FileError
from llamatrain.gguf.reader import Gguf
from llamatrain.graph import ops as O
from llamatrain.graph.ops import glu, rms_norm, sigmoid, silu, softplus, split_columns, swiglu
from llamatrain.graph.tensor import Tensor
from llamatrain.model import layers
from llamatrain.model.architecture import Architecture, Key, Shape
from llamatrain.model.architectures.qwen2vl import SECTIONS
from llamatrain.model.forward import ForwardPass
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.limits import BadHyperparameter

RECURRENT_BLOCKS = "attention.recurrent_layers"


@dataclass(frozen=True)
class AttentionPeriod(Key):
    """The period of attention: the last block of each period has it. A file may also list the other blocks."""

    def read(self, gguf: Gguf, key: str, known: Mapping[str, Any]) -> Any:
        """Read the period, and check that a list of blocks is the same."""
        period = super().read(gguf, key, known)
        list_key = f"{key.partition('.')[0]}.{RECURRENT_BLOCKS}"
        marks = gguf.metadata.get(list_key)
        if marks is not None and period > 0:
            expected = [layer % period != period - 1 for layer in range(known["layers"])]
            if [bool(mark) for mark in np.atleast_1d(marks)[: len(expected)]] != expected:
                raise FileError(
                    f"{gguf.path}: {list_key} must leave out every {period}th block and no other; other patterns are "
                    "not supported",
                    code="unsupported-model",
                )
        return period


KEYS = layers.BLOCK_KEYS | {
    "full_attention_interval": AttentionPeriod("attention_period", int, 4, min_value=1),
    "ssm.conv_kernel": Key("taps", int, 4, min_value=2),
    "ssm.state_size": Key("key_size", int, 128, min_value=1),
    "ssm.group_count": Key("key_heads", int, 16, min_value=1),
    "ssm.time_step_rank": Key("value_heads", int, 16, min_value=1),
    "ssm.inner_size": Key("value_width", int, 2048, min_value=1),
}


def attends(h: Hyperparameters, layer: int) -> bool:
    """Return True if a block has attention."""
    return layer % h.extra["attention_period"] == h.extra["attention_period"] - 1


def is_recurrent(h: Hyperparameters, layer: int) -> bool:
    """Return True if a block has a gated delta net."""
    return not attends(h, layer)


def sized_by(name: str) -> layers.Size:
    """Return a function that gives one of the hyperparameters."""
    return lambda h: int(h.extra[name])


def key_width(h: Hyperparameters) -> int:
    """Return the width of all keys of the delta net."""
    return int(h.extra["key_heads"] * h.extra["key_size"])


def channels(h: Hyperparameters) -> int:
    """Return the number of convolved channels: queries, keys and values."""
    return 2 * key_width(h) + int(h.extra["value_width"])


def value_size(h: Hyperparameters) -> int:
    """Return the size of a value."""
    return int(h.extra["value_width"] // h.extra["value_heads"])


# ---- weights ----------------------------------------------------------------


def tiled_heads(h: Hyperparameters, size: int) -> np.ndarray:
    """Return, for each row of values in a file, its place in Hugging Face's order.

    There the value heads of one key head are neighbors; in files they are as far apart as there are key heads.
    """
    key_heads, heads = int(h.extra["key_heads"]), int(h.extra["value_heads"])
    order = np.arange(heads).reshape(key_heads, -1).T.ravel()
    return (order[:, None] * size + np.arange(size)).ravel()


def mixed_order(h: Hyperparameters) -> np.ndarray:
    """Return the order of the rows of queries, keys and values."""
    first = 2 * key_width(h)
    return np.concatenate([np.arange(first), first + tiled_heads(h, value_size(h))])


def value_order(h: Hyperparameters) -> np.ndarray:
    """Return the order of values."""
    return tiled_heads(h, value_size(h))


def head_order(h: Hyperparameters) -> np.ndarray:
    """Return the order of numbers of value heads."""
    return tiled_heads(h, 1)


def initial_decay(generator: np.random.Generator, shape: Shape) -> np.ndarray:
    """Return initial factors of the decay, as those of Mamba 2 (Dao and Gu 2024): -1 to -16."""
    return -generator.uniform(1, 16, shape)


def initial_step(generator: np.random.Generator, shape: Shape) -> np.ndarray:
    """Return initial biases such that softplus gives steps from 0.001 to 0.1, evenly in their logarithm."""
    steps = np.exp(generator.uniform(np.log(0.001), np.log(0.1), shape))
    return np.log(np.expm1(steps))


def width(h: Hyperparameters) -> int:
    """Return the width of the model."""
    return h.embd


DELTA_NET: dict[str, layers.Weight] = {
    "blk.{}.attn_qkv.weight": layers.block_matrix(
        channels, width, "linear_attn.in_proj_qkv", row_order=mixed_order
    ),
    "blk.{}.attn_gate.weight": layers.block_matrix(
        sized_by("value_width"), width, "linear_attn.in_proj_z", row_order=value_order
    ),
    "blk.{}.ssm_alpha.weight": layers.block_matrix(
        sized_by("value_heads"), width, "linear_attn.in_proj_a", row_order=head_order
    ),
    "blk.{}.ssm_beta.weight": layers.block_matrix(
        sized_by("value_heads"), width, "linear_attn.in_proj_b", row_order=head_order
    ),
    "blk.{}.ssm_conv1d.weight": layers.block_taps(channels, "linear_attn.conv1d", row_order=mixed_order),
    "blk.{}.ssm_dt.bias": layers.block_vector(
        "bias",
        sized_by("value_heads"),
        "linear_attn.dt_bias",
        initial=initial_step,
        row_order=head_order,
    ),
    "blk.{}.ssm_a": layers.block_vector(
        "bias",
        sized_by("value_heads"),
        "linear_attn.A_log",
        initial=initial_decay,
        trained_as_log=True,
        row_order=head_order,
    ),
    "blk.{}.ssm_norm.weight": layers.block_vector("norm", value_size, "linear_attn.norm"),
    "blk.{}.ssm_out.weight": layers.block_matrix(
        width, sized_by("value_width"), "linear_attn.out_proj", column_order=value_order, residual=True
    ),
}
ATTENTION = layers.ATTENTION | layers.HEAD_NORMS
ATTENTION |= {  # each head of queries is followed by its gate
    "blk.{}.attn_q.weight": layers.block_matrix(lambda h: 2 * h.width, width, "self_attn.q_proj")
}


def mixers(delta_net: dict[str, layers.Weight]) -> dict[str, layers.Weight]:
    """Return the weights of blocks before their feed-forward part, by those of a gated delta net."""
    return (
        layers.BEFORE_ATTENTION
        | layers.restrict_blocks(ATTENTION, attends)
        | layers.restrict_blocks(delta_net, is_recurrent)
        | layers.POST_ATTENTION_NORM
    )


MIXERS = mixers(DELTA_NET)


# ---- blocks -----------------------------------------------------------------


def attention(model: ForwardPass, layer: int, y: Tensor) -> Tensor:
    """Return the gated attention of a block: each head of queries is followed by its gate."""
    h, prefix = model.h, f"blk.{layer}"
    tokens = model.tokens.size
    both = O.reshape(model.linear(y, f"{prefix}.attn_q"), shape=(tokens * h.heads, 2 * h.head_size))
    q, gate = split_columns(both, sizes=(h.head_size, h.head_size))
    q = model.norm(model.split_heads(O.reshape(q, shape=(tokens, h.width)), h.heads), f"{prefix}.attn_q_norm")
    k = model.split_heads(model.linear(y, f"{prefix}.attn_k"), h.kv_heads)
    k = model.norm(k, f"{prefix}.attn_k_norm")
    v = model.split_heads(model.linear(y, f"{prefix}.attn_v"), h.kv_heads)
    attended = model.attention(layer, model.apply_rope(layer, q), model.apply_rope(layer, k), v)
    gate = model.keep_scored_rows(layer, O.reshape(gate, shape=(tokens, h.width)))
    return model.linear(glu(gate, attended), f"{prefix}.attn_output")


def unit_length(model: ForwardPass, x: Tensor, factor: float = 1.0) -> Tensor:
    """Scale each vector to unit length times a factor; like llama.cpp, with the epsilon of the norms."""
    size = x.shape[-1]
    weight = O.fill(shape=(size,), value=factor / sqrt(size), dtype=x.dtype)
    return rms_norm(x, weight, eps=model.h.rms_eps / size)


class Projections(NamedTuple):
    """Projections of the input of a gated delta net, a row for each token."""

    mixed: Tensor  # queries, keys and values before the convolution
    gate: Tensor  # of values
    alpha: Tensor  # for the decay of value heads
    beta: Tensor  # for the share of new values


def project(model: ForwardPass, layer: int, y: Tensor) -> Projections:
    """Return the projections by the four weights of a block."""
    names = ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta")
    return Projections(*(model.linear(y, f"blk.{layer}.{name}") for name in names))


def delta_net(
    model: ForwardPass,
    layer: int,
    y: Tensor,
    project: Callable[[ForwardPass, int, Tensor], Projections] = project,
    spread_heads: Callable[[ForwardPass, Tensor], Tensor] = lambda model, x: x,
) -> Tensor:
    """Return the output of a gated delta net; `spread_heads` takes queries and keys of unit length."""
    h, prefix, grid = model.h, f"blk.{layer}", model.tokens.shape
    key_heads, heads, size = (int(h.extra[name]) for name in ("key_heads", "value_heads", "key_size"))
    mixed, gate, alpha, beta = project(model, layer, y)
    mixed = O.reshape(mixed, shape=(*grid, channels(h)))
    mixed = silu(model.recurrence.convolve(layer, mixed, model.weights[f"{prefix}.ssm_conv1d.weight"]))
    widths = key_width(h), key_width(h), int(h.extra["value_width"])
    q, k, v = split_columns(O.reshape(mixed, shape=(model.tokens.size, channels(h))), sizes=widths)
    q, k = (O.reshape(each, shape=(*grid, key_heads, size)) for each in (q, k))
    steps = softplus(O.add(alpha, model.weights[f"{prefix}.ssm_dt.bias"]))
    decay = O.mul(steps, model.weights[f"{prefix}.ssm_a"])
    output = model.recurrence.delta_rule(
        layer,
        spread_heads(model, unit_length(model, q, size**-0.5)),
        spread_heads(model, unit_length(model, k)),
        O.reshape(v, shape=(*grid, heads, value_size(h))),
        O.reshape(decay, shape=(*grid, heads)),
        O.reshape(sigmoid(beta), shape=(*grid, heads)),
        True,
    )
    output = O.reshape(model.norm(output, f"{prefix}.ssm_norm"), shape=(model.tokens.size, widths[2]))
    gated = model.keep_scored_rows(layer, swiglu(gate, output))
    return model.linear(gated, f"{prefix}.ssm_out")


def block(
    model: ForwardPass,
    layer: int,
    x: Tensor,
    transform: layers.FeedForward = layers.feed_forward,
    recur: Callable[[ForwardPass, int, Tensor], Tensor] = delta_net,
) -> Tensor:
    """Return the output of a block: attention or a gated delta net, and a feed-forward part."""
    prefix = f"blk.{layer}"
    mix = attention if attends(model.h, layer) else recur
    output = mix(model, layer, model.norm(x, f"{prefix}.attn_norm"))
    x = O.add(model.keep_scored_rows(layer, x), output)
    return O.add(x, transform(model, layer, model.norm(x, f"{prefix}.post_attention_norm")))


def rule_states(h: Hyperparameters) -> dict[str, Shape]:
    """Return what a block with the rule keeps while decoding: the last inputs of the convolution, and the matrices."""
    heads, size = int(h.extra["value_heads"]), int(h.extra["key_size"])
    return {"conv": (int(h.extra["taps"]) - 1, channels(h)), "rule": (heads, size, value_size(h))}


def states(h: Hyperparameters, layer: int) -> dict[str, Shape]:
    """Return the state that a block keeps while decoding."""
    return {} if attends(h, layer) else rule_states(h)


def check(h: Hyperparameters) -> None:
    """Raise BadHyperparameter if the sizes of the heads do not fit together."""
    key_heads, heads, all_values = (
        int(h.extra[name]) for name in ("key_heads", "value_heads", "value_width")
    )
    if heads % key_heads:
        raise BadHyperparameter("key_heads", f"{key_heads}", f"must divide the {heads} value heads")
    if all_values % heads:
        raise BadHyperparameter(
            "value_width", f"{all_values}", f"must be a multiple of the {heads} value heads"
        )


ARCHITECTURE = Architecture(
    name="qwen35",
    keys=layers.KEYS | KEYS,
    lists=SECTIONS,
    weights=layers.EMBEDDINGS | MIXERS | layers.FEED_FORWARD | layers.FINAL,
    rotation="halves",
    embed=layers.embed,
    block=block,
    final_norm=layers.final_norm,
    partial_rotary=True,
    attends=attends,
    states=states,
    check=check,
    is_kept=layers.is_extra,
    shifts_context=False,
    supported_values=layers.SUPPORTED_VALUES,
)
