"""The model as a graph: from tokens to a loss, and from tokens and a cache to logits.

The blocks are those of the architecture (architectures/).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import ceil
from typing import NamedTuple

import numpy as np

from llamatrain.errors import UsageError
from llamatrain.graph import ops as O
from llamatrain.graph.ops import (
    CHUNK,
    causal_conv,
    causal_conv_step,
    cross_entropy_judged,
    cross_entropy_loss,
    cross_entropy_rows,
    diag_mask_inf,
    flash_attn,
    gated_delta_rule,
    gated_delta_step,
    linear_cross_entropy,
    linear_cross_entropy_judged,
    linear_cross_entropy_rows,
    rows_of_lse,
    scale_rows,
    sigmoid,
    soft_max,
    softcap,
    split_columns,
)
from llamatrain.graph.tensor import F32, I32, DType, DynamicDim, Shape, Tensor, parameter, placeholder, state
from llamatrain.model.architecture import AttentionMask
from llamatrain.model.distill import Teacher, distillation_loss
from llamatrain.model.forward import (
    ForwardPass,
    Recurrence,
    rope_table_for,
    rows_per_position,
    table_positions,
)
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.lora import Weights
from llamatrain.model.visible_keys import range_names

MASKED = np.float32(-1e30)  # added to scores of masked keys; finite, so that infinities are errors
# the number of scored tokens is rounded to sixteenths of a batch and to whole tiles
SCORED_STEPS, TILE_ROWS = 16, 32
OUTPUT_BIAS = "output.bias"
SINKS = "blk.{}.attn_sinks.weight"
DIRECTION = "direction.{}"  # of a control vector, for the output of a block
MASK_ELEMENTS = 1 << 16  # elements of a mask that are computed at a time


def trainable_weights(h: Hyperparameters, dtype: DType = F32) -> Weights:
    """Return every weight as a trainable parameter."""
    return Weights({name: parameter(name, shape, dtype) for name, shape in h.shapes.items()})


def last_hidden(model: ForwardPass) -> tuple[Tensor, list[Tensor]]:
    """Return the input of the output weight, a row for each token, and the input of each block."""
    *block_inputs, x = run_blocks(model)
    return model.h.architecture.final_norm(model, x), block_inputs


def run_blocks(model: ForwardPass) -> list[Tensor]:
    """Return the input of the first block, and the output of each, to which its control vector is added."""
    states = [model.h.architecture.embed(model)]
    for layer in range(model.h.layers):
        x = model.h.architecture.block(model, layer, states[-1])
        direction = model.weights.get(DIRECTION.format(layer))
        states.append(x if direction is None else add_direction(model.h, x, direction, layer))
    return states


def add_direction(h: Hyperparameters, x: Tensor, direction: Tensor, layer: int) -> Tensor:
    """Add a direction of a control vector to the output of a block."""
    check_one_stream(h, x)
    return O.add(x, direction, name=f"blk.{layer}.control")


def check_one_stream(h: Hyperparameters, x: Tensor) -> None:
    """Raise if blocks give out more than one vector for a token."""
    if x.shape[-1] != h.embd:
        raise UsageError(
            f"control vectors do not work with a {h.architecture.name}, whose blocks give out several vectors for "
            "each token; choose another model",
            code="unsupported-model",
        )


def compute_logits(h: Hyperparameters, x: Tensor, weights: Weights) -> Tensor:
    """Return the logits of rows, with the output weight's bias, adapters and soft cap."""
    bias = weights.get(OUTPUT_BIAS)
    y = O.matmul(x, weights[h.output_weight], *(() if bias is None else (bias,)), name="output")
    y = y if h.tied else weights.add_lora(y, x, h.output_weight)
    return softcap(y, cap=h.logit_cap) if h.logit_cap else y


def output_is_one_matrix(h: Hyperparameters, weights: Weights) -> bool:
    """Return True if logits need no bias and no adapter, so that a loss can compute them itself."""
    return OUTPUT_BIAS not in weights and h.output_weight not in weights.deltas


# ---- training --------------------------------------------------------------


Evaluation = tuple[Tensor, ...]  # the loss, the number of correct tokens, and each token's part of the loss


@dataclass(frozen=True)
class TrainingGraph:
    """The inputs of a training graph, by their names in a batch (data.batches.Batch), and the loss.

    The loss is a sum over tokens, each times its weight.
    """

    inputs: dict[str, Tensor]
    table: Tensor
    block_inputs: list[Tensor]
    loss: Tensor
    more_states: dict[Tensor, np.ndarray]  # other states, and their values
    evaluation: Evaluation | None = None  # for evaluation
    terms: tuple[Tensor, ...] = ()  # the terms of a preference loss
    rewards: Tensor | None = None  # the rewards of the answers
    term_parts: tuple[Tensor, ...] = ()  # the parts of each pair or answer in these terms
    embeddings: Tensor | None = None  # of all texts, in contrastive training
    log_probs: tuple[Tensor, ...] = ()  # of generated tokens, and then by the reference


def build_training(
    h: Hyperparameters,
    weights: Weights,
    batch: int,
    length: int,
    table: Tensor,
    *,
    drop_untrained: bool = False,
    flash: bool = True,
    squared: bool = False,
    teacher: Teacher | None = None,
    balance: float = 0.0,
) -> TrainingGraph:
    """Build the graph of the loss.

    With `drop_untrained`, tokens without a weight are dropped as soon as no other token needs them. With `balance`,
    that many times the mean balance loss of the blocks is added.
    """
    # these losses need all rows
    all_rows = squared or not flash or balance or (teacher is not None and teacher.h.vocab > h.vocab)
    inputs = make_inputs(batch, length, table.dtype, flash, drop_untrained and not all_rows)
    if h.is_recurrent or (teacher is not None and teacher.h.is_recurrent):
        inputs.setdefault("starts", placeholder("starts", (batch, length), I32))
    weights = weights.for_rows(length, inputs.get("scored_indices"))
    model = make_forward_pass(h, weights, inputs, table)
    model = replace(model, balance_weights=inputs["weights"]) if balance else model
    x, block_inputs = last_hidden(model)
    scored = OutputTargets(x, inputs["targets"], inputs["weights"])
    if squared:
        targets = state("wanted", (h.vocab, h.vocab), table.dtype)
        eye = 2 * np.eye(h.vocab, dtype=table.dtype.numpy) - 1
        return TrainingGraph(
            inputs, table, block_inputs, squared_error(h, weights, scored, targets), {targets: eye}
        )
    loss, evaluation = cross_entropy(h, weights, scored, fused=flash)
    if teacher is None:
        loss = add_balance(loss, model.balance_terms, scored.weights, balance)
        return TrainingGraph(inputs, table, block_inputs, loss, {}, evaluation)
    teacher_rope, teacher_table = teacher.rope_table(table_positions(h, table))
    teacher_logits = compute_logits(
        teacher.h, forward(teacher.h, teacher.weights, inputs, teacher_rope)[0], teacher.weights
    )
    loss = distillation_loss(compute_logits(h, x, weights), teacher_logits, *scored[1:], teacher.share)
    loss = add_balance(loss, model.balance_terms, scored.weights, balance)
    return TrainingGraph(inputs, table, block_inputs, loss, {teacher_rope: teacher_table}, evaluation)


class OutputTargets(NamedTuple):
    """The input rows of the output weight, with their targets and weights."""

    x: Tensor
    targets: Tensor
    weights: Tensor


def cross_entropy(
    h: Hyperparameters, weights: Weights, scored: OutputTargets, fused: bool
) -> tuple[Tensor, Evaluation]:
    """Return the loss, and the outputs for evaluation."""
    x, *targets = scored
    if fused and output_is_one_matrix(h, weights):
        loss = linear_cross_entropy(x, weights[h.output_weight], *targets, cap=h.logit_cap, name="loss")
        return loss, linear_cross_entropy_judged(
            x, weights[h.output_weight], *targets, cap=h.logit_cap, name="loss"
        )
    logits = compute_logits(h, x, weights)
    return cross_entropy_loss(logits, *targets, name="loss"), cross_entropy_judged(
        logits, *targets, name="loss"
    )


def token_losses(
    h: Hyperparameters, weights: Weights, inputs: dict[str, Tensor], table: Tensor, temperature: float = 1.0
) -> tuple[Tensor, list[Tensor]]:
    """Return the cross entropy of each token, whose logits are divided by the temperature, and the inputs of the blocks."""
    weights = weights.for_rows(inputs["tokens"].shape[1], inputs.get("scored_indices"))
    x, block_inputs = forward(h, weights, inputs, table)
    if "mask" not in inputs and output_is_one_matrix(h, weights) and (temperature == 1 or not h.logit_cap):
        x = O.scale(x, by=1 / temperature) if temperature != 1 else x
        losses = linear_cross_entropy_rows(x, weights[h.output_weight], inputs["targets"], cap=h.logit_cap)
        return losses, block_inputs
    logits = compute_logits(h, x, weights)
    logits = O.scale(logits, by=1 / temperature) if temperature != 1 else logits
    return cross_entropy_rows(logits, inputs["targets"]), block_inputs


def add_balance(loss: Tensor, terms: Sequence[Tensor], weights: Tensor, balance: float) -> Tensor:
    """Return a loss plus `balance` times the mean of terms, and times the weight of all tokens, as the loss is a sum."""
    if not balance or not terms:
        return loss
    total = reduce(O.add, terms)
    return O.add(loss, O.scale(O.mul(total, O.sum(weights)), by=balance / len(terms)))


def make_inputs(
    batch: int, length: int, dtype: DType, flash: bool, drop_untrained: bool, prefix: str = ""
) -> dict[str, Tensor]:
    """Return the inputs of a forward pass by name; their names in the graph begin with `prefix`."""
    count = batch * length
    if drop_untrained and count > TILE_ROWS:
        count = DynamicDim(count, step=ceil(count / (SCORED_STEPS * TILE_ROWS)) * TILE_ROWS)
    inputs = {
        input_name: placeholder(prefix + input_name, (batch, length), I32)
        for input_name in ("tokens", "positions")
    }
    if flash:
        inputs["starts"] = placeholder(f"{prefix}starts", (batch, length), I32)
    else:
        inputs["mask"] = placeholder(f"{prefix}mask", (batch, length, length), dtype)
    inputs["targets"] = placeholder(f"{prefix}targets", (count,), I32)
    inputs["weights"] = placeholder(f"{prefix}weights", (count,), dtype)
    if isinstance(count, DynamicDim):
        # the indices of tokens with a weight
        inputs["scored_indices"] = placeholder(f"{prefix}scored_indices", (count,), I32)
    return inputs


def make_forward_pass(
    h: Hyperparameters, weights: Weights, inputs: dict[str, Tensor], table: Tensor
) -> ForwardPass:
    """Return the forward pass of a batch."""

    def attend_flash(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = h.attention_mask(layer)
        if h.architecture.causal:
            ranges = [inputs["starts"]]
        else:
            ranges, mask = [inputs[name] for name in range_names(mask.window)], replace(mask, window=0)
        out, lse = flash_attn(q, k, v, *ranges, **vars(mask), name=f"blk.{layer}.attn")
        return reduce_by_sinks(out, lse, weights.get(SINKS.format(layer)))

    def attend_plain(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sinks = weights.get(SINKS.format(layer))
        return plain_attention(h.attention_mask(layer), q, k, v, inputs["mask"], sinks)

    return ForwardPass(
        h=h,
        weights=weights,
        tokens=inputs["tokens"],
        positions=inputs["positions"],
        table=table,
        attend=attend_plain if "mask" in inputs else attend_flash,
        recurrence=recurrence_of_rows(inputs.get("starts")),
        scored_tokens=inputs.get("scored_indices"),
    )


def forward(
    h: Hyperparameters, weights: Weights, inputs: dict[str, Tensor], table: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Run all blocks on the inputs; return the output weight's input and the input of each block."""
    return last_hidden(make_forward_pass(h, weights, inputs, table))


@dataclass(frozen=True)
class BlockOutputsGraph:
    """The inputs of a graph by name, and the mean output of each block over the tokens of a row."""

    inputs: dict[str, Tensor]
    shares: Tensor  # (1, length): how much each token counts in the means
    means: list[Tensor]  # (1, width) for each block


def build_block_outputs(
    h: Hyperparameters, weights: Weights, length: int, table: Tensor
) -> BlockOutputsGraph:
    """Build the graph of the mean output of each block."""
    inputs = make_inputs(1, length, table.dtype, flash=True, drop_untrained=False)
    _, *outputs = run_blocks(make_forward_pass(h, weights, inputs, table))
    check_one_stream(h, outputs[0])
    shares = placeholder("shares", (1, length), table.dtype)
    means = [O.matmul_nn(shares, output) for output in outputs]
    return BlockOutputsGraph(
        {name: inputs[name] for name in ("tokens", "positions", "starts")}, shares, means
    )


def recurrence_of_rows(starts: Tensor | None) -> Recurrence:
    """Return the recurrence of whole rows; `starts` has the first token of each token's sample."""

    def convolve(layer: int, x: Tensor, taps: Tensor) -> Tensor:
        assert starts
        return causal_conv(x, taps, starts, name=f"blk.{layer}.conv")

    def delta_rule(
        layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, correct: bool
    ) -> Tensor:
        assert starts
        name = f"blk.{layer}.delta"
        return gated_delta_rule(q, k, v, decay, beta, starts, chunk=CHUNK, correct=correct, name=name)[0]

    return Recurrence(convolve=convolve, delta_rule=delta_rule)


def reduce_by_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Return attention whose softmax has one more score for each head, the sink, which has no value (Xiao et al. 2023).

    A row is multiplied with the share of the softmax's sum that is not the sink's.
    """
    return scale_rows(out, sigmoid(O.sub(rows_of_lse(lse), sinks))) if sinks else out


def softmax_with_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    """Return the softmax of scores (batch, kv_heads, group, length, keys) and of each head's sink, without the latter."""
    *lead, length, keys = scores.shape
    column = O.repeat(O.reshape(sinks, shape=(1, *lead[1:], 1, 1)), shape=(*lead, length, 1))
    return split_columns(soft_max(O.join_columns(scores, column)), sizes=(keys, 1))[0]


def plain_attention(
    attention_mask: AttentionMask, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None = None
) -> Tensor:
    """Compute attention as product, softmax and product.

    `mask` (batch, length, length) is added to the scores.
    """
    batch, length, heads, size = q.shape
    kv_heads = k.shape[2]

    def by_head(x: Tensor, group: int) -> Tensor:
        shape = (batch, kv_heads, group, length, size)
        return O.reshape(O.cont(O.permute(x, axes=(0, 2, 1, 3))), shape=shape)

    q = by_head(q, heads // kv_heads)
    k, v = by_head(k, 1), by_head(v, 1)
    scores = O.scale(O.matmul(q, k), by=attention_mask.scale)  # (batch, kv_heads, group, length, length)
    scores = softcap(scores, cap=attention_mask.cap) if attention_mask.cap else scores
    scores = O.add(scores, O.reshape(mask, shape=(batch, 1, 1, length, length)))
    scores = (
        O.add(scores, window_mask(attention_mask.window, length, mask.dtype))
        if attention_mask.window
        else scores
    )
    shares = softmax_with_sinks(scores, sinks) if sinks else soft_max(scores)
    attended = O.reshape(O.matmul_nn(shares, v), shape=(batch, heads, length, size))
    return O.cont(O.permute(attended, axes=(0, 2, 1, 3)))


def window_mask(window: int, length: int, dtype: DType) -> Tensor:
    """Return what is added to scores for a window: 0 within it, minus infinity before it."""
    rows = diag_mask_inf(O.fill(shape=(length, length), value=0.0, dtype=dtype), past=window - 1)
    return O.cont(O.transpose(rows))


def dense_mask(starts: np.ndarray, queries: slice = slice(None)) -> np.ndarray:
    """Return the mask of plain attention that is equal to `starts` (batch, length) of flash attention.

    With `queries`, only the rows of these queries are returned.
    """
    positions = np.arange(starts.shape[1])
    # (batch, query, key)
    visible = (positions <= positions[queries, None]) & (positions >= starts[:, queries, None])
    return np.where(visible, np.float32(0), MASKED)


def dense_mask_chunks(starts: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield the dense mask for some queries at a time, to save memory."""
    batch, length = starts.shape
    step = max(1, MASK_ELEMENTS // (batch * length))
    for first in range(0, length, step):
        queries = slice(first, first + step)
        yield queries, dense_mask(starts, queries)


def squared_error(h: Hyperparameters, weights: Weights, scored: OutputTargets, targets: Tensor) -> Tensor:
    """Return the squared error of each logit against +1 for the target and -1 for other tokens.

    llama.cpp's sine demo of 2023 used this loss.
    """
    target_rows = O.get_rows(targets, scored.targets)
    errors = O.sum_rows(O.sqr(O.sub(compute_logits(h, scored.x, weights), target_rows)))
    return O.sum(O.mul(O.reshape(errors, shape=scored.weights.shape), scored.weights), name="loss")


# ---- decoding --------------------------------------------------------------


@dataclass(frozen=True)
class DecodingGraph:
    """The graph of a decoding step: tokens at positions in, the logits of one token of each text out.

    The caches hold the keys and values of all earlier tokens. Each text has a slot: its own part of the caches.
    """

    tokens: Tensor  # (slots, count)
    positions: Tensor  # (slots, count); each is also the last key that a token sees
    cache_rows: Tensor  # (slots, count): the row of the cache that a token takes
    starts: Tensor  # (slots, count): zeros
    token_index: Tensor  # (slots,): the indices, among all tokens, of those whose logits are computed
    logits: Tensor  # (slots, vocabulary)
    caches: list[Tensor]  # keys and values of each block that has its own, or its state


def build_decoding(
    h: Hyperparameters, weights: Weights, count: int, table: Tensor, caches: list[Tensor], slots: int = 1
) -> DecodingGraph:
    """Build the graph that decodes `count` tokens of each slot at a time."""
    tokens, positions, cache_rows, starts = (
        placeholder(name, (slots, count), I32) for name in ("tokens", "positions", "cache_rows", "starts")
    )
    token_index = placeholder("place", (slots,), I32)
    updated: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values by block
    memory = {cache.name: cache for cache in caches}

    def update_cache(cache: Tensor, x: Tensor) -> Tensor:
        ctx, width = cache.shape[0] // slots, cache.shape[1]
        rows = O.set_rows(
            cache,
            O.reshape(x, shape=(slots * count, width)),
            O.reshape(cache_rows, shape=(slots * count,)),
            into=True,
        )
        return O.reshape(rows, shape=(slots, ctx, *x.shape[2:]))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if f"cache.{layer}.k" in memory:
            updated[layer] = (
                update_cache(memory[f"cache.{layer}.k"], k),
                update_cache(memory[f"cache.{layer}.v"], v),
            )
        keys, values = updated[h.kv_block(layer)]
        out, lse = flash_attn(q, keys, values, starts, positions, **vars(h.attention_mask(layer)))
        return reduce_by_sinks(out, lse, weights.get(SINKS.format(layer)))

    def convolve(layer: int, x: Tensor, taps: Tensor) -> Tensor:
        return causal_conv_step(memory[f"state.{layer}.conv"], x, taps, into=True)[1]

    def delta_rule(
        layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, correct: bool
    ) -> Tensor:
        state = memory[f"state.{layer}.rule"]
        return gated_delta_step(state, q, k, v, decay, beta, correct=correct, into=True)[1]

    x, _ = last_hidden(
        ForwardPass(
            h=h,
            weights=weights,
            tokens=tokens,
            positions=positions,
            table=table,
            attend=attend,
            recurrence=Recurrence(convolve=convolve, delta_rule=delta_rule),
        )
    )
    logits = compute_logits(h, O.get_rows(x, token_index), weights)
    return DecodingGraph(tokens, positions, cache_rows, starts, token_index, logits, caches)


@dataclass(frozen=True)
class RowCopy:
    """The graph that copies rows from the caches or states of one text to those of several slots."""

    source_rows: Tensor  # (count,)
    target_rows: Tensor  # (count,)
    copied: list[Tensor]  # the changed caches or states


def copy_rows(caches: Sequence[tuple[Tensor, Tensor]], count: int) -> RowCopy:
    """Build the graph that copies `count` rows from the first to the second of each pair."""
    source_rows, target_rows = (placeholder(name, (count,), I32) for name in ("source_rows", "target_rows"))

    def as_rows(cache: Tensor) -> Tensor:
        rows = cache.shape[0]
        return O.reshape(cache, shape=(rows, cache.size // rows))

    copied = [
        O.set_rows(as_rows(many), O.get_rows(as_rows(one), source_rows), target_rows, into=True)
        for one, many in caches
    ]
    return RowCopy(source_rows, target_rows, copied)


@dataclass(frozen=True)
class CacheShift:
    """The graph that removes rows from the caches: later rows move up, and their keys rotate back."""

    positions: Tensor  # (1, count): zeros, where `turn` has its one rotation
    rotation: Tensor
    caches: list[Tensor]  # the shifted caches


def shift_cache(h: Hyperparameters, caches: list[Tensor], first: int, last: int, end: int) -> CacheShift:
    """Build the graph that removes the rows `first` to `last` of `end` rows."""
    count = end - last
    positions = placeholder("places", (1, count), I32)
    shift_rotation = placeholder("turn", rope_table_shape(h, 1), caches[0].dtype)

    def move_rows(cache: Tensor, heads: int, rotation: Tensor | None) -> Tensor:
        width = cache.shape[1]
        rows = O.cont(O.view(cache, slices=((last, end, 1), (0, width, 1))))
        if rotation:
            by_head = O.reshape(rows, shape=(1, count, heads, width // heads))
            rows = O.reshape(
                O.rope_back(by_head, positions, rotation, halves=h.rotates_halves), shape=(count, width)
            )
        return O.set(cache, rows, slices=((first, first + count, 1), (0, width, 1)), into=True)

    shifted: list[Tensor] = []
    for place, layer in enumerate(h.kv_blocks):
        heads, rotation = h.for_block(layer).kv_heads, rope_table_for(h, shift_rotation, layer)
        keys, values = caches[2 * place : 2 * place + 2]
        shifted += [move_rows(keys, heads, rotation), move_rows(values, heads, None)]
    return CacheShift(positions, shift_rotation, shifted)


def make_caches(h: Hyperparameters, ctx: int, dtype: DType = F32, slots: int = 1) -> list[Tensor]:
    """Return the memory of each block for `slots` texts.

    It has a state, and keys and values of `ctx` positions if the block has its own; slots follow each other.
    """
    caches = []
    for layer in range(h.layers):
        shapes = h.architecture.states(h, layer)
        caches += [state(f"state.{layer}.{name}", (slots, *shape), dtype) for name, shape in shapes.items()]
        if layer in h.kv_blocks:
            width = h.for_block(layer).kv_width
            caches += [state(f"cache.{layer}.{kind}", (slots * ctx, width), dtype) for kind in ("k", "v")]
    return caches


def is_state(cache: Tensor) -> bool:
    """Return True for the state of a recurrent block, False for a cache of keys or values."""
    return cache.name.startswith("state.")


def rope_state(h: Hyperparameters, positions: int, dtype: DType = F32) -> Tensor:
    """Return the leaf of the table of all rotations (Hyperparameters.rope_table)."""
    return state("rope", rope_table_shape(h, positions), dtype)


def rope_table_shape(h: Hyperparameters, positions: int) -> Shape:
    """Return the shape of the table of all rotations."""
    pairs, rows = h.table_pairs, sum(rows_per_position(h)) * positions
    return (rows, 2, pairs) if h.rotates_halves else (rows, pairs, 2)
