"""Decoding with a cache: tokens in, the next one's logits out, and text made of that.

The weights are used where they lie, be it in a file's map or in the memory of a training run. There is a program for each of a
few numbers of tokens; what fits none is filled up with its last token, which then writes its row of the cache more than once.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile

import numpy as np

from llamatrain.engine.backend import Backend, Memory, create_backend
from llamatrain.engine.plan import Plan, plan
from llamatrain.engine.program import Program
from llamatrain.errors import LlamatrainError, UsageError
from llamatrain.graph.tensor import Tensor, collect_leaves
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.lora import Weights
from llamatrain.model.transformer import (
    DecodingGraph,
    build_decoding,
    make_caches,
    rope_state,
    shift_cache,
    trainable_weights,
)
from llamatrain.sample.chain import draw
from llamatrain.sample.options import SamplingOptions

CHUNKS = (1, 8, 64)  # tokens that are fed at once
CHANGED = -1  # no token: one that followed others once


@dataclass(frozen=True)
class DecodeCost:
    """What decoding takes beside the weights, in bytes."""

    caches: int
    arena: int

    @property
    def total(self) -> int:
        return self.caches + self.arena


class Decoder:
    """A text that grows: `feed` it tokens, `reset` it for another one. Between texts the weights may change."""

    def __init__(
        self,
        h: Hyperparameters,
        arrays: Mapping[str, np.ndarray],
        *,
        ctx: int,
        threads: int = 1,
        kernels: str = "cpu",
        arena: Memory | None = None,
        weights: Weights | None = None,
        drop_base: bool = False,
    ) -> None:
        """`arrays` are the weights by their GGUF names; an `arena` that is large enough (see `plan`) is used.

        With `drop_base`, the pages of a quantised weight's file are handed back after each reading.
        """
        self.h, self.ctx = h, ctx
        self._held: list[int] = []  # what the cache holds
        self._backend = create_backend(kernels, threads, drop_base)
        self._graphs = DecodingGraphs(h, ctx, self._backend, weights)
        leaves = {tensor: arrays[tensor.name] for tensor in self._graphs.leaves}
        self._memory = leaves | {cache: self._backend.allocate(cache.nbytes) for cache in self._graphs.caches}
        self._memory[self._graphs.table] = h.rope_table(ctx)
        self._arena = arena
        self._programs: dict[int, tuple[DecodingGraph, Program]] = {}

    @staticmethod
    def plan(
        h: Hyperparameters,
        ctx: int,
        threads: int = 1,
        kernels: str = "cpu",
        weights: Weights | None = None,
        drop_base: bool = False,
    ) -> DecodeCost:
        """What a decoder will take; nothing is allocated."""
        graphs = DecodingGraphs(h, ctx, create_backend(kernels, threads, drop_base), weights)
        kept = sum(tensor.nbytes for tensor in (*graphs.caches, graphs.table))
        return DecodeCost(kept, graphs.arena())

    def foresee(self, *counts: int) -> None:
        """Make the programs that as many tokens at once will need."""
        for each in counts:
            self._program(self._graphs.chunk(each))

    def reset(self) -> None:
        """Begin anew: what the cache holds is out of sight."""
        self._held.clear()

    def rewound(self, tokens: Sequence[int]) -> int:
        """Go back to what the cache holds of a text's beginning, and say how much that is; the last token is to be fed in any
        case."""
        same = (mine == given for mine, given in zip(self._held, tokens[:-1], strict=False))
        del self._held[sum(takewhile(bool, same)) :]
        return self.position

    @property
    def position(self) -> int:
        return len(self._held)

    @property
    def room(self) -> int:
        """How many more tokens can be fed."""
        return self.ctx - self.position

    def feed(self, tokens: Sequence[int]) -> np.ndarray:
        """The logits of the token after these: a view, valid until more is fed."""
        ids = np.asarray(tokens, np.int64)
        if not 1 <= len(ids) <= self.room:
            raise LlamatrainError(
                f"{len(ids)} tokens do not fit a context of {self.ctx} that holds {self.position}; a larger one takes more"
            )
        if ids.min() < 0 or ids.max() >= self.h.vocab:
            raise UsageError(
                f"token {ids[(ids < 0) | (ids >= self.h.vocab)][0]} is not among the {self.h.vocab} of the model"
            )
        while len(ids):
            logits, ids = self._run(ids)
        return logits

    def shift(self, keep: int) -> bool:
        """Make room as llama.cpp does: behind the first `keep` tokens the older half goes, and what is left follows with its
        keys turned back. False where that would be none."""
        gone = (self.position - keep) // 2
        if gone < 1:
            return False
        made = shift_cache(self.h, self._graphs.caches, keep, keep + gone, self.position)
        program = Program(self._graphs.laid_out(made.caches), self._memory, self._backend)
        program.write(made.positions, 0)
        program.write(made.rotation, self.h.rope_shift(gone, self.ctx))
        program()
        self._held[keep:] = [CHANGED] * (self.position - keep - gone)
        return True

    def _run(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The logits after the tokens that were taken, and those that are left."""
        size = self._graphs.chunk(len(ids))
        made, program = self._program(size)
        taken = min(size, len(ids))
        steps = np.minimum(np.arange(size), taken - 1)
        program.write(made.tokens, ids[steps])
        program.write(made.positions, self.position + steps)
        program.write(made.starts, 0)
        program.write(made.token_index, taken - 1)
        program()
        self._held += ids[:taken].tolist()
        return program.read(made.logits)[0], ids[taken:]

    def _program(self, size: int) -> tuple[DecodingGraph, Program]:
        if size not in self._programs:
            if self._arena is None:
                self._arena = self._backend.allocate(self._graphs.arena())
            made, laid_out = self._graphs.planned(size)
            program = Program(laid_out, self._memory, self._backend, arena=self._arena)
            self._programs[size] = made, program
        return self._programs[size]


class DecodingGraphs:
    """The graphs for each number of tokens, over the same weights and caches."""

    def __init__(
        self, h: Hyperparameters, ctx: int, backend: Backend, weights: Weights | None = None
    ) -> None:
        self.h, self.backend = h, backend
        self.chunks = sorted({min(chunk, ctx) for chunk in CHUNKS})
        self.weights, self.caches, self.table = (
            weights or trainable_weights(h),
            make_caches(h, ctx),
            rope_state(h, ctx),
        )
        self._planned: dict[int, tuple[DecodingGraph, Plan]] = {}

    @property
    def leaves(self) -> list[Tensor]:
        """The weights, and the factors of their adapters."""
        factors = [
            factor
            for deltas in self.weights.deltas.values()
            for delta in deltas
            for factor in (delta.a, delta.b)
        ]
        return collect_leaves([*self.weights.values(), *factors])

    def chunk(self, count: int) -> int:
        """How many of so many tokens are fed at once, or would be."""
        return next((chunk for chunk in self.chunks if chunk >= count), self.chunks[-1])

    def planned(self, size: int) -> tuple[DecodingGraph, Plan]:
        if size not in self._planned:
            made = build_decoding(self.h, self.weights, size, self.table, self.caches)
            self._planned[size] = made, self.laid_out([made.logits])
        return self._planned[size]

    def laid_out(self, outputs: Sequence[Tensor]) -> Plan:
        return plan(outputs, scratch=self.backend.scratch, resident=self.backend.resident_bytes)

    def arena(self) -> int:
        """Bytes that are enough for each of them."""
        return max(self.planned(size)[1].arena for size in self.chunks)


# ---- text ------------------------------------------------------------------


class Generation:
    """The tokens that follow a prompt; `ended` says why there are no more: "end", "n" or "ctx". The decoder begins anew."""

    def __init__(
        self,
        decoder: Decoder,
        prompt: Sequence[int],
        options: SamplingOptions,
        ends: Collection[int] = (),
        keep: int | None = None,
        again: bool = False,
    ) -> None:
        """`ends` are the tokens that end a text; they are not given. The first `keep` stay where the context is full, and older
        ones go; without it that is the end. `again`: what the decoder holds of the prompt is not computed again."""
        self.decoder, self.options, self.ends, self.keep, self.again = decoder, options, ends, keep, again
        self.tokens = [int(token) for token in prompt]
        self.ended = ""

    def __iter__(self) -> Iterator[int]:
        fed = self.decoder.rewound(self.tokens if self.again else ())
        for number in count():
            if number == self.options.n:
                self.ended = "n"
                return
            if len(self.tokens) - fed >= self.decoder.room:
                if not self._made_room(fed):
                    self.ended = "ctx"
                    return
                fed = len(self.tokens) - 1
            logits = self.decoder.feed(self.tokens[fed:])
            fed = len(self.tokens)
            token = draw(logits, self.options, number, self.tokens)
            if token in self.ends:
                self.ended = "end"
                return
            self.tokens.append(token)
            yield token

    def _made_room(self, fed: int) -> bool:
        if self.keep is None:
            return False
        if before := self.tokens[fed:-1]:
            self.decoder.feed(before)
        return self.decoder.shift(self.keep)
