"""Qwen 3 Next (Qwen Team 2025): the blocks of a qwen35moe, whose projections lie in other weights.

Neighboring value heads read one key head. Queries, keys, values and gates have two weights; in older files they have
one, in which those of a key head are together. So are the numbers of a key head in `ssm_ba`.
"""

from dataclasses import replace
from functools import partial

import numpy as np

from llamatrain.graph import ops as O
from llamatrain.graph.ops import join_columns, split_columns
from llamatrain.graph.tensor import Tensor
from llamatrain.model import experts, layers
from llamatrain.model.architectures import qwen35, qwen35moe
from llamatrain.model.architectures.qwen35 import Projections
from llamatrain.model.forward import ForwardPass
from llamatrain.model.hyperparameters import Hyperparameters

JOINED = "blk.{}.ssm_in.weight"


def sizes(h: Hyperparameters) -> tuple[int, int, int, int]:
    """Return the number of key heads, the size of keys, and the value heads and elements of values of each."""
    key_heads, key_size = int(h.extra["key_heads"]), int(h.extra["key_size"])
    return (
        key_heads,
        key_size,
        int(h.extra["value_heads"]) // key_heads,
        int(h.extra["value_width"]) // key_heads,
    )


# ---- weights ----------------------------------------------------------------


def joined_rows(h: Hyperparameters) -> int:
    """Return the number of all queries, keys, values and gates."""
    return qwen35.channels(h) + int(h.extra["value_width"])


def part_rows(h: Hyperparameters) -> list[np.ndarray]:
    """Return where queries, keys, values and gates are in the joined weight."""
    key_heads, key_size, _, width = sizes(h)
    rows = np.arange(joined_rows(h)).reshape(key_heads, -1)
    return [part.ravel() for part in np.split(rows, np.cumsum([key_size, key_size, width]), axis=1)]


def mixed_rows(h: Hyperparameters) -> np.ndarray:
    """Return where queries, keys and values are in the joined weight."""
    return np.concatenate(part_rows(h)[:3])


def gate_rows(h: Hyperparameters) -> np.ndarray:
    """Return where gates are in the joined weight."""
    return part_rows(h)[3]


def replaced(name: str, part: int, **facts: object) -> layers.Weight:
    """Return a weight of a qwen35 that is a part of the joined one."""
    kind = replace(qwen35.DELTA_NET[name], module=PROJECTIONS[JOINED].module)
    return replace(kind, part=(part, 2), replaced_by=JOINED, **facts)  # type: ignore[arg-type]


PROJECTIONS = {
    JOINED: layers.block_matrix(joined_rows, experts.width, "linear_attn.in_proj_qkvz", optional=True),
    "blk.{}.ssm_ba.weight": layers.block_matrix(
        lambda h: 2 * int(h.extra["value_heads"]), experts.width, "linear_attn.in_proj_ba"
    ),
}
DELTA_NET = {
    "blk.{}.attn_qkv.weight": replaced("blk.{}.attn_qkv.weight", 0, row_order=mixed_rows),
    "blk.{}.attn_gate.weight": replaced("blk.{}.attn_gate.weight", 1, row_order=gate_rows),
    **PROJECTIONS,
    **{
        name: replace(kind, row_order=None)
        for name, kind in qwen35.DELTA_NET.items()
        if kind.role != "matrix"
    },
    "blk.{}.ssm_out.weight": replace(qwen35.DELTA_NET["blk.{}.ssm_out.weight"], column_order=None),
}


# ---- blocks -----------------------------------------------------------------


def split_heads(model: ForwardPass, x: Tensor, parts: tuple[int, ...]) -> list[Tensor]:
    """Return the parts of rows in which each key head has the parts of these sizes."""
    tokens, key_heads = model.tokens.size, int(model.h.extra["key_heads"])
    columns = split_columns(O.reshape(x, shape=(tokens * key_heads, sum(parts))), sizes=parts)
    return [O.reshape(part, shape=(tokens, key_heads * part.shape[1])) for part in columns]


def project(model: ForwardPass, layer: int, y: Tensor) -> Projections:
    """Return the projections, which a joined weight or two weights give, and those for the numbers of heads."""
    prefix, (_, key_size, heads, width) = f"blk.{layer}", sizes(model.h)
    if JOINED.format(layer) in model.weights:
        *parts, gate = split_heads(
            model, model.linear(y, f"{prefix}.ssm_in"), (key_size, key_size, width, width)
        )
        mixed = join_columns(*parts)
    else:
        mixed, gate = (model.linear(y, f"{prefix}.{name}") for name in ("attn_qkv", "attn_gate"))
    beta, alpha = split_heads(model, model.linear(y, f"{prefix}.ssm_ba"), (heads, heads))
    return Projections(mixed, gate, alpha, beta)


def spread_heads(model: ForwardPass, x: Tensor) -> Tensor:
    """Return key heads (batch, length, key_heads, size), each repeated for its value heads."""
    key_heads, size, count, _ = sizes(model.h)
    rows = O.reshape(x, shape=(model.tokens.size * key_heads, size))
    return O.reshape(join_columns(*[rows] * count), shape=(*model.tokens.shape, key_heads * count, size))


ARCHITECTURE = replace(
    qwen35moe.ARCHITECTURE,
    name="qwen3next",
    lists={},
    weights=layers.EMBEDDINGS | qwen35.mixers(DELTA_NET) | qwen35moe.MIXTURE | layers.FINAL,
    block=partial(
        qwen35.block,
        transform=qwen35moe.feed_forward,
        recur=partial(qwen35.delta_net, project=project, spread_heads=spread_heads),
    ),
)
