"""A model as a graph: from tokens to a loss, and from a token and a cache to the next one's logits.

Its blocks are the architecture's own (architectures/).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import numpy as np

from llamatrain.graph import ops as O
from llamatrain.graph.ops import (
    cross_entropy_judged,
    cross_entropy_loss,
    diag_mask_inf,
    flash_attn,
    linear_cross_entropy,
    linear_cross_entropy_judged,
    soft_max,
    softcap,
)
from llamatrain.graph.tensor import F32, I32, DType, DynamicDim, Shape, Tensor, parameter, placeholder, state
from llamatrain.model.architecture import AttentionMask
from llamatrain.model.distill import Teacher, distilled
from llamatrain.model.forward import ForwardPass, rotation_of
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.lora import Weights

HIDDEN = np.float32(
    -1e30
)  # what is added to a score that must not count: finite, so that only faults are infinite
PARTS, UNIT = 16, 32  # tokens that have a weight are counted in sixteenths of a batch, and in whole tiles
PIECE = 1 << 16  # elements of a mask that are made at a time


def parameters(h: Hyperparameters, dtype: DType = F32) -> Weights:
    """Every weight, to be trained."""
    return Weights({name: parameter(name, shape, dtype) for name, shape in h.shapes.items()})


def hidden(model: ForwardPass) -> tuple[Tensor, list[Tensor]]:
    """What the output weight reads, a row for each of the (batch, length) tokens; and each block's input."""
    architecture, borders = model.h.architecture, []
    x = architecture.embed(model)
    for layer in range(model.h.layers):
        borders.append(x)
        x = architecture.block(model, layer, x)
    return architecture.last(model, x), borders


def logits_of(h: Hyperparameters, x: Tensor, weights: Weights) -> Tensor:
    y = O.matmul(x, weights[h.output], name="output")
    y = y if h.tied else weights.added(y, x, h.output)
    return softcap(y, cap=h.cap) if h.cap else y


# ---- training --------------------------------------------------------------


Judged = tuple[Tensor, ...]  # the loss, how many targets were likeliest, and each token's part of the loss


@dataclass(frozen=True)
class Training:
    """Inputs by the names that batches have (data.rows.Batch), and the loss: a sum over tokens, each by its weight."""

    inputs: dict[str, Tensor]
    table: Tensor
    borders: list[Tensor]
    loss: Tensor
    more_states: dict[Tensor, np.ndarray]  # beside the table
    judged: Judged | None = None  # for programs that judge
    terms: tuple[
        Tensor, ...
    ] = ()  # that a loss of preferences adds up, each a sum over what is of its own kind
    rewards: Tensor | None = None  # of its answers
    each: tuple[Tensor, ...] = ()  # of those terms, the parts of each pair or answer


def training(
    h: Hyperparameters,
    weights: Weights,
    batch: int,
    length: int,
    table: Tensor,
    *,
    sparse: bool = False,
    flash: bool = True,
    squared: bool = False,
    teacher: Teacher | None = None,
) -> Training:
    """Where weights are `sparse`, a token without goes no further than others may need it."""
    whole = (
        squared or not flash or (teacher is not None and teacher.h.vocab > h.vocab)
    )  # of what is cut, no rows are left out
    inputs = inputs_of(batch, length, table.dtype, flash, sparse and not whole)
    weights = weights.for_rows(length, inputs.get("weighed"))
    x, borders = through(h, weights, inputs, table)
    aimed = OutputTargets(x, inputs["targets"], inputs["weights"])
    if squared:
        wanted = state("wanted", (h.vocab, h.vocab), table.dtype)
        eye = 2 * np.eye(h.vocab, dtype=table.dtype.numpy) - 1
        return Training(inputs, table, borders, squared_error(h, weights, aimed, wanted), {wanted: eye})
    loss, judged = cross_entropy(h, weights, aimed, fused=flash)
    if teacher is None:
        return Training(inputs, table, borders, loss, {}, judged)
    own, turns = teacher.table(table.shape[0] // len(h.rotations))
    told = logits_of(teacher.h, through(teacher.h, teacher.weights, inputs, own)[0], teacher.weights)
    loss = distilled(logits_of(h, x, weights), told, *aimed[1:], teacher.share)
    return Training(inputs, table, borders, loss, {own: turns}, judged)


class OutputTargets(NamedTuple):
    """What the output weight reads, with the targets and weights of its rows."""

    x: Tensor
    targets: Tensor
    shares: Tensor


def cross_entropy(
    h: Hyperparameters, weights: Weights, aimed: OutputTargets, fused: bool
) -> tuple[Tensor, Judged]:
    """Return the loss, and what programs that judge have of it."""
    x, *aims = aimed
    if fused and h.output not in weights.deltas:
        loss = linear_cross_entropy(x, weights[h.output], *aims, cap=h.cap, name="loss")
        return loss, linear_cross_entropy_judged(x, weights[h.output], *aims, cap=h.cap, name="loss")
    logits = logits_of(h, x, weights)
    return cross_entropy_loss(logits, *aims, name="loss"), cross_entropy_judged(logits, *aims, name="loss")


def inputs_of(
    batch: int, length: int, dtype: DType, flash: bool, sparse: bool, name: str = ""
) -> dict[str, Tensor]:
    """What a way through a model is told of its rows; names begin with this one."""
    count = batch * length
    if sparse and count > UNIT:
        count = DynamicDim(count, step=ceil(count / (PARTS * UNIT)) * UNIT)
    inputs = {each: placeholder(name + each, (batch, length), I32) for each in ("tokens", "positions")}
    if flash:
        inputs["starts"] = placeholder(f"{name}starts", (batch, length), I32)
    else:
        inputs["mask"] = placeholder(f"{name}mask", (batch, length, length), dtype)
    inputs["targets"] = placeholder(f"{name}targets", (count,), I32)
    inputs["weights"] = placeholder(f"{name}weights", (count,), dtype)
    if isinstance(count, DynamicDim):
        inputs["weighed"] = placeholder(
            f"{name}weighed", (count,), I32
        )  # the numbers of those that have a weight
    return inputs


def through(
    h: Hyperparameters, weights: Weights, inputs: dict[str, Tensor], table: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """From rows to what the output weight reads, and each block's input."""

    def flashing(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn(q, k, v, inputs["starts"], **vars(h.sight(layer)), name=f"blk.{layer}.attn")[0]

    def plain(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain_attention(h, h.sight(layer), q, k, v, inputs["mask"])

    way = ForwardPass(
        h=h,
        weights=weights,
        tokens=inputs["tokens"],
        positions=inputs["positions"],
        table=table,
        attend=flashing if "starts" in inputs else plain,
        weighed=inputs.get("weighed"),
    )
    return hidden(way)


def plain_attention(
    h: Hyperparameters, sight: AttentionMask, q: Tensor, k: Tensor, v: Tensor, mask: Tensor
) -> Tensor:
    """Attention as a product, a softmax and a product; `mask` (batch, length, length) is added to the scores."""
    batch, length, group = q.shape[0], q.shape[1], h.heads // h.kv_heads

    def by_head(x: Tensor, heads: tuple[int, int]) -> Tensor:
        return O.reshape(O.cont(O.permute(x, axes=(0, 2, 1, 3))), shape=(batch, *heads, length, h.head_size))

    q = by_head(q, (h.kv_heads, group))
    k, v = (by_head(each, (h.kv_heads, 1)) for each in (k, v))
    scores = O.scale(O.matmul(q, k), by=sight.scale)  # (batch, kv_heads, group, length, length)
    scores = softcap(scores, cap=sight.cap) if sight.cap else scores
    scores = O.add(scores, O.reshape(mask, shape=(batch, 1, 1, length, length)))
    scores = O.add(scores, outside(sight.window, length, mask.dtype)) if sight.window else scores
    seen = O.reshape(O.matmul_nn(soft_max(scores), v), shape=(batch, h.heads, length, h.head_size))
    return O.cont(O.permute(seen, axes=(0, 2, 1, 3)))


def outside(window: int, length: int, dtype: DType) -> Tensor:
    """What is added besides: nothing to the scores of keys within a window, to others what no number is less than."""
    rows = diag_mask_inf(O.fill(shape=(length, length), value=0.0, dtype=dtype), past=window - 1)
    return O.cont(O.transpose(rows))


def mask_of(starts: np.ndarray, queries: slice = slice(None)) -> np.ndarray:
    """What plain attention adds to scores where flash attention is told of `starts` (batch, length); for some of the queries."""
    places = np.arange(starts.shape[1])
    seen = (places <= places[queries, None]) & (places >= starts[:, queries, None])  # (batch, query, key)
    return np.where(seen, np.float32(0), HIDDEN)


def masks_of(starts: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """The same, some queries at a time: whole, it would be there twice."""
    batch, length = starts.shape
    step = max(1, PIECE // (batch * length))
    for first in range(0, length, step):
        queries = slice(first, first + step)
        yield queries, mask_of(starts, queries)


def squared_error(h: Hyperparameters, weights: Weights, aimed: OutputTargets, wanted: Tensor) -> Tensor:
    """Of each logit against +1 for the target and -1 for every other token, as the ancestor's sine demo had it."""
    aims = O.get_rows(wanted, aimed.targets)
    errors = O.sum_rows(O.sqr(O.sub(logits_of(h, aimed.x, weights), aims)))
    return O.sum(O.mul(O.reshape(errors, shape=aimed.shares.shape), aimed.shares), name="loss")


# ---- decoding --------------------------------------------------------------


@dataclass(frozen=True)
class Decoding:
    """Some tokens in, at their positions; the logits of one of them out. The cache holds the keys and values of all before."""

    tokens: Tensor  # (1, count)
    positions: Tensor  # (1, count); each also the row of the cache that a token takes
    starts: Tensor  # (1, count): zeros
    place: Tensor  # (1,): which of the tokens to give the logits of
    logits: Tensor  # (1, vocabulary)
    caches: list[Tensor]  # (positions, kv_heads · size), keys and values of each layer


def decoding(
    h: Hyperparameters, weights: Weights, count: int, table: Tensor, caches: list[Tensor]
) -> Decoding:
    tokens, positions, starts = (
        placeholder(name, (1, count), I32) for name in ("tokens", "positions", "starts")
    )
    place = placeholder("place", (1,), I32)

    def cached(cache: Tensor, x: Tensor) -> Tensor:
        rows = O.set_rows(
            cache,
            O.reshape(x, shape=(count, cache.shape[1])),
            O.reshape(positions, shape=(count,)),
            into=True,
        )
        return O.reshape(rows, shape=(1, cache.shape[0], h.kv_heads, h.head_size))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = cached(caches[2 * layer], k), cached(caches[2 * layer + 1], v)
        return flash_attn(q, keys, values, starts, positions, **vars(h.sight(layer)))[0]

    x, _ = hidden(
        ForwardPass(h=h, weights=weights, tokens=tokens, positions=positions, table=table, attend=attend)
    )
    logits = logits_of(h, O.get_rows(x, place), weights)
    return Decoding(tokens, positions, starts, place, logits, caches)


@dataclass(frozen=True)
class CacheShift:
    """Some rows leave the caches, and those behind them follow: keys are turned back by as many positions."""

    places: Tensor  # (1, count): zeros, where `turn` has its one rotation
    turn: Tensor
    moved: list[Tensor]  # the caches as they are then


def shift(h: Hyperparameters, caches: list[Tensor], first: int, last: int, end: int) -> CacheShift:
    """The rows from `first` to `last` leave, of `end` in all."""
    count, width = end - last, h.kv_width
    places, turn = (
        placeholder("places", (1, count), I32),
        placeholder("turn", rotations(h, 1), caches[0].dtype),
    )

    def moved(cache: Tensor, rotation: Tensor | None) -> Tensor:
        rows = O.cont(O.view(cache, slices=((last, end, 1), (0, width, 1))))
        if rotation:
            heads = O.reshape(rows, shape=(1, count, h.kv_heads, h.head_size))
            rows = O.reshape(O.rope_back(heads, places, rotation, halves=h.halves), shape=(count, width))
        return O.set(cache, rows, slices=((first, first + count, 1), (0, width, 1)), into=True)

    keys = [rotation_of(h, turn, layer) for layer in range(h.layers)]
    return CacheShift(
        places,
        turn,
        [moved(cache, None if number % 2 else keys[number // 2]) for number, cache in enumerate(caches)],
    )


def caches_of(h: Hyperparameters, ctx: int, dtype: DType = F32) -> list[Tensor]:
    """Memory for the keys and values of so many positions, two states a layer."""
    return [
        state(f"cache.{layer}.{kind}", (ctx, h.kv_width), dtype)
        for layer in range(h.layers)
        for kind in ("k", "v")
    ]


def rope_state(h: Hyperparameters, positions: int, dtype: DType = F32) -> Tensor:
    """Where the table of all rotations goes (hyperparameters.Hyperparameters.table)."""
    return state("rope", rotations(h, positions), dtype)


def rotations(h: Hyperparameters, positions: int) -> Shape:
    pairs, rows = h.rope.size // 2, len(h.rotations) * positions
    return (rows, 2, pairs) if h.halves else (rows, pairs, 2)
