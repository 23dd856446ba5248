"""Decoding with a key-value cache: tokens in, logits of the next token out, and generation on top of that.

The weights are used in place, in a mapped file or in the memory of a training run. There is a program for
each of a few chunk sizes; a smaller chunk is padded with its last token, which then writes its row of the
cache several times. A model whose blocks have a state gets whole chunks only, because each token changes it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, takewhile

import numpy as np

from llamatrain.engine.device import Device, Memory, View, create_device
from llamatrain.engine.plan import Plan, plan
from llamatrain.engine.program import Program
from llamatrain.errors import LlamatrainError, UsageError
from llamatrain.graph.tensor import Tensor, collect_leaves, dense
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.lora import Weights
from llamatrain.model.transformer import (
    DecodingGraph,
    build_decoding,
    is_state,
    make_caches,
    rope_state,
    shift_cache,
    trainable_weights,
)
from llamatrain.sample.chain import draw_token
from llamatrain.sample.options import SamplingOptions

CHUNKS = (1, 8, 64)  # tokens per run
STALE = -1  # a cached position whose context was shifted


@dataclass(frozen=True)
class DecodeCost:
    """The memory of decoding without the weights, in bytes."""

    caches: int
    arena: int

    @property
    def total(self) -> int:
        """The sum in bytes."""
        return self.caches + self.arena


@dataclass(frozen=True)
class SavedState:
    """The state of a recurrent model behind some tokens."""

    position: int
    values: list[np.ndarray]


class Decoder:
    """Decodes one text at a time: `feed` it tokens, `reset` it for another text.

    The weights may change between texts.
    """

    def __init__(
        self,
        h: Hyperparameters,
        arrays: Mapping[str, Memory],
        *,
        ctx: int,
        threads: int = 1,
        kernels: str = "cpu",
        arena: Memory | None = None,
        weights: Weights | None = None,
        drop_base: bool = False,
    ) -> None:
        """Create a decoder over weights by GGUF name; an `arena` that is large enough (see `plan`) is used.

        With `drop_base`, the pages of a quantized weight's file are released after each read.
        """
        self.h, self.ctx = h, ctx
        self._cached: list[int] = []  # the tokens in the cache
        self._saved: SavedState | None = None
        self.device = create_device(kernels, threads, drop_base)
        self.graphs = DecodingGraphs(h, ctx, self.device, weights)
        leaves = {tensor: self._upload(arrays[tensor.name]) for tensor in self.graphs.leaves}
        self.memory = leaves | {cache: self.device.allocate(cache.nbytes) for cache in self.graphs.caches}
        self.memory[self.graphs.table] = self._upload(h.rope_table(ctx))
        self.arena = arena
        self._programs: dict[int, tuple[DecodingGraph, Program]] = {}

    def _upload(self, memory: Memory) -> Memory:
        """Return memory of the device: an array's copy, or what is there already."""
        return self.device.upload(memory) if isinstance(memory, np.ndarray) else memory

    @staticmethod
    def plan(
        h: Hyperparameters,
        ctx: int,
        threads: int = 1,
        kernels: str = "cpu",
        weights: Weights | None = None,
        drop_base: bool = False,
    ) -> DecodeCost:
        """Return the memory that a decoder will need; nothing is allocated."""
        graphs = DecodingGraphs(h, ctx, create_device(kernels, threads, drop_base), weights)
        cached_bytes = sum(tensor.nbytes for tensor in (*graphs.caches, graphs.table))
        return DecodeCost(cached_bytes, graphs.arena_bytes())

    def precompile(self, *counts: int) -> None:
        """Compile the programs for these numbers of tokens."""
        for number in counts:
            self._program(self.graphs.chunk_size(number))

    def reset(self) -> None:
        """Start a new text; the cache is ignored, and states are cleared."""
        self._cached.clear()
        self._saved = None
        for state in self._states:
            self.device.write(state, 0)

    def rewind(self, tokens: Sequence[int], unit: int = 1) -> int:
        """Keep the part of the cache that is a prefix of `tokens`, and return its length, a multiple of `unit`.

        The last token must be fed in any case.
        """
        kept = count_shared(self._cached, tokens[:-1])
        kept -= kept % unit
        if self.h.is_recurrent and kept < self.position:
            kept = self._restore_state(kept)
        if kept == 0:
            self.reset()
        del self._cached[kept:]
        return self.position

    def save_state(self) -> None:
        """Save the state of a recurrent model, so that `rewind` can go back to this position until the next reset."""
        self._saved = SavedState(self.position, [self.device.read(state).copy() for state in self._states])

    def _restore_state(self, most: int) -> int:
        """Go back to the saved state if it has at most `most` tokens; return its position, or 0."""
        if self._saved is None or self._saved.position > most:
            return 0
        for state, values in zip(self._states, self._saved.values, strict=True):
            self.device.write(state, values)
        return self._saved.position

    @cached_property
    def _states(self) -> list[View]:
        """The states of recurrent blocks."""
        states = [cache for cache in self.graphs.caches if is_state(cache)]
        strides = ([stride * cache.dtype.size for stride in dense(cache.shape)] for cache in states)
        return [
            self.device.view(self.memory[cache], cache, 0, each)
            for cache, each in zip(states, strides, strict=True)
        ]

    @property
    def position(self) -> int:
        """The number of tokens in the cache."""
        return len(self._cached)

    @property
    def free_positions(self) -> int:
        """The number of tokens that can still be fed."""
        return self.ctx - self.position

    def feed(self, tokens: Sequence[int]) -> np.ndarray:
        """Feed tokens and return the logits of the next one: a view, valid until the next call."""
        ids = np.asarray(tokens, np.int64)
        if not 1 <= len(ids) <= self.free_positions:
            raise LlamatrainError(
                f"{len(ids)} tokens do not fit into the context ({self.position} of {self.ctx} "
                "tokens are used); choose a larger context",
                code="context-full",
            )
        check_tokens(self.h, ids)
        while len(ids):
            logits, ids = self._run(ids)
        return logits

    def shift_context(self, keep: int) -> bool:
        """Drop the older half of the tokens after the first `keep`, as llama.cpp does, and rotate the keys of the rest.

        Return False if nothing can be dropped.
        """
        if not self.h.architecture.shifts_context:
            raise LlamatrainError(
                f"the context of {self.ctx} tokens is full, and a {self.h.architecture.name} cannot drop its "
                "older half, because its state depends on all tokens; choose a larger context",
                code="context-full",
            )
        dropped = (self.position - keep) // 2
        if dropped < 1:
            return False
        graph = shift_cache(self.h, self.graphs.caches, keep, keep + dropped, self.position)
        program = Program(self.graphs.plan_memory(graph.caches), self.memory, self.device)
        program.write(graph.positions, 0)
        program.write(graph.rotation, self.h.rope_shift(dropped, self.ctx))
        program()
        self._cached[keep:] = [STALE] * (self.position - keep - dropped)
        return True

    def _run(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Run one chunk; return the logits and the tokens that are left."""
        size = self.graphs.chunk_size(len(ids))
        graph, program = self._program(size)
        fed = min(size, len(ids))
        steps = np.minimum(np.arange(size), fed - 1)
        program.write(graph.tokens, ids[steps])
        program.write(graph.positions, self.position + steps)
        program.write(graph.cache_rows, self.position + steps)
        program.write(graph.starts, 0)
        program.write(graph.token_index, fed - 1)
        program()
        self._cached += ids[:fed].tolist()
        return program.read(graph.logits)[0], ids[fed:]

    def _program(self, size: int) -> tuple[DecodingGraph, Program]:
        if size not in self._programs:
            if self.arena is None:
                self.arena = self.device.allocate(self.graphs.arena_bytes())
            graph, memory_plan = self.graphs.graph_and_plan(size)
            program = Program(memory_plan, self.memory, self.device, arena=self.arena)
            self._programs[size] = graph, program
        return self._programs[size]


def check_tokens(h: Hyperparameters, ids: np.ndarray) -> None:
    """Raise if a token is not in the vocabulary."""
    if len(unknown := ids[(ids < 0) | (ids >= h.vocab)]):
        raise UsageError(f"token ids must be below {h.vocab} (got {unknown[0]})", code="unknown-token")


def count_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens at their beginning two texts share."""
    same = (mine == theirs for mine, theirs in zip(one, other, strict=False))
    return sum(takewhile(bool, same))


class DecodingGraphs:
    """The graphs for each chunk size, over the same weights and caches."""

    def __init__(self, h: Hyperparameters, ctx: int, device: Device, weights: Weights | None = None) -> None:
        self.h, self.device = h, device
        self.chunks = sorted({min(chunk, ctx) for chunk in CHUNKS})
        self.weights = weights or trainable_weights(h)
        self.caches = make_caches(h, ctx)
        self.table = rope_state(h, ctx)
        self._planned: dict[int, tuple[DecodingGraph, Plan]] = {}

    @property
    def leaves(self) -> list[Tensor]:
        """The weights and the factors of their adapters."""
        factors = [
            factor
            for deltas in self.weights.deltas.values()
            for delta in deltas
            for factor in (delta.a, delta.b)
        ]
        return collect_leaves([*self.weights.values(), *factors])

    def chunk_size(self, count: int) -> int:
        """Return the chunk size to use for `count` tokens."""
        if self.h.is_recurrent:  # no padding
            return max(chunk for chunk in self.chunks if chunk <= count)
        return next((chunk for chunk in self.chunks if chunk >= count), self.chunks[-1])

    def graph_and_plan(self, size: int) -> tuple[DecodingGraph, Plan]:
        """Return graph and memory plan for a chunk size."""
        if size not in self._planned:
            graph = build_decoding(self.h, self.weights, size, self.table, self.caches)
            self._planned[size] = graph, self.plan_memory([graph.logits])
        return self._planned[size]

    def plan_memory(self, outputs: Sequence[Tensor]) -> Plan:
        """Return a memory plan for outputs."""
        return plan(
            outputs,
            scratch=self.device.scratch,
            resident=self.device.resident_bytes,
            rewrite=self.device.rewrite,
        )

    def arena_bytes(self) -> int:
        """Return the size of an arena that fits every chunk size."""
        return max(self.graph_and_plan(size)[1].arena for size in self.chunks)


# ---- text ------------------------------------------------------------------


class Generation:
    """An iterator over the tokens after a prompt. Then `stop_reason` is "end", "n" or "ctx"."""

    def __init__(
        self,
        decoder: Decoder,
        prompt: Sequence[int],
        options: SamplingOptions,
        ends: Collection[int] = (),
        keep: int | None = None,
        reuse_cache: bool = False,
    ) -> None:
        """Prepare a generation.

        `ends` are tokens that end a text; they are not yielded. With `keep`, a full context is shifted and
        its first `keep` tokens stay; without it generation ends there. `reuse_cache`: keep what the decoder
        has computed of the prompt.
        """
        self.decoder = decoder
        self.options = options
        self.ends = ends
        self.keep = keep
        self.reuse_cache = reuse_cache
        self.tokens = [int(token) for token in prompt]
        self.stop_reason = ""

    def __iter__(self) -> Iterator[int]:
        fed = self.decoder.rewind(self.tokens if self.reuse_cache else ())
        for number in count():
            if number == self.options.n:
                self.stop_reason = "n"
                return
            if len(self.tokens) - fed >= self.decoder.free_positions:
                if not self._make_room(fed):
                    self.stop_reason = "ctx"
                    return
                fed = len(self.tokens) - 1
            logits = self.decoder.feed(self.tokens[fed:])
            fed = len(self.tokens)
            token = draw_token(logits, self.options, number, self.tokens)
            if token in self.ends:
                self.stop_reason = "end"
                return
            self.tokens.append(token)
            yield token

    def _make_room(self, fed: int) -> bool:
        if self.keep is None:
            return False
        if pending := self.tokens[fed:-1]:
            self.decoder.feed(pending)
        return self.decoder.shift_context(self.keep)
