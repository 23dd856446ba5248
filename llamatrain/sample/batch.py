"""Decoding of many texts at a time: each step reads the weights once, and gives every text its next token.

A text has a slot: its own part of the caches, and a row in the matrix products of a step. A text that ends frees its
slot for the next one. Prompts are read one after the other by a `Decoder`, whose cache is then copied to a slot. They
come in sorted order, so that a beginning that some of them share is computed once.

The tokens of a request do not depend on the other requests, on their order, or on how they are divided among
processes:

- A row of a product has the same bits whatever the other rows are, and a step always has as many rows as there are
  slots. The kernels for up to three rows and for more round differently, and so do, with adapters of rank 16 or less,
  those for up to sixteen rows and for more. Within these ranges the number of slots changes no bits either, except in
  mixtures of experts, whose products depend on it.
- A prompt is read in the same chunks as by `Decoder`, and prompts share whole chunks of the largest size only.

The logits of the first token are those of `Decoder`, with the same bits. The others differ from them by rounding, because
a step of `Decoder` has one row; with one slot they are the same, too. On a graphics card the first of these points is
left to its libraries.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from llamatrain.engine.device import Memory, create_device
from llamatrain.engine.plan import Plan
from llamatrain.engine.program import Program
from llamatrain.errors import UsageError
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.lora import Weights
from llamatrain.model.transformer import (
    DecodingGraph,
    RowCopy,
    build_decoding,
    copy_rows,
    is_state,
    make_caches,
)
from llamatrain.sample.chain import draw_token
from llamatrain.sample.decoder import DecodeCost, Decoder, DecodingGraphs, check_tokens, count_shared
from llamatrain.sample.options import SamplingOptions


@dataclass(frozen=True)
class Request:
    """A text to continue."""

    tokens: Sequence[int]  # the prompt
    options: SamplingOptions


@dataclass(frozen=True)
class Completion:
    """The tokens that follow a prompt."""

    index: int  # of its request
    tokens: list[int]  # without the prompt and the token that ends the text
    stop_reason: str  # "end", "n" or "ctx", as in `Generation`; "stop" if the caller ended it


# the index of a request and its next token -> True if the text ends with this token
Stops = Callable[[int, int], bool]


# ---- decoding --------------------------------------------------------------


class BatchDecoder:
    """Decodes a text in each of `slots` slots. After a change of the weights, `reset` must be called."""

    def __init__(
        self,
        h: Hyperparameters,
        arrays: Mapping[str, Memory],
        *,
        ctx: int,
        slots: int,
        threads: int = 1,
        kernels: str = "cpu",
        arena: Memory | None = None,
        weights: Weights | None = None,
        drop_base: bool = False,
    ) -> None:
        """Create a decoder over weights by GGUF name; an `arena` that is large enough (see `plan`) is used.

        With `drop_base`, the pages of a quantized weight's file are released after each read.
        """
        self.h, self.ctx, self.slots = h, ctx, slots
        device = create_device(kernels, threads, drop_base)
        self._prompts = Decoder(
            h,
            arrays,
            ctx=ctx,
            threads=threads,
            kernels=kernels,
            arena=arena,
            weights=weights,
            drop_base=drop_base,
        )
        self._graphs = BatchGraphs(self._prompts.graphs, ctx, slots)
        if self._prompts.arena is None:
            self._prompts.arena = device.allocate(self._graphs.arena_bytes())
        memory = self._prompts.memory | {
            cache: device.allocate(cache.nbytes) for cache in self._graphs.caches
        }
        self._step, *self._copies = (
            Program(each, memory, device, arena=self._prompts.arena) for each in self._graphs.plans
        )
        self._positions = [0] * slots
        self._read: list[int] = []  # the prompt that was read last
        self._logits = np.empty(0, np.float32)  # of the token behind it

    @staticmethod
    def plan(
        h: Hyperparameters,
        ctx: int,
        slots: int,
        threads: int = 1,
        kernels: str = "cpu",
        weights: Weights | None = None,
        drop_base: bool = False,
    ) -> DecodeCost:
        """Return the memory that a decoder will need; nothing is allocated."""
        prompts = DecodingGraphs(h, ctx, create_device(kernels, threads, drop_base), weights)
        graphs = BatchGraphs(prompts, ctx, slots)
        cached_bytes = sum(tensor.nbytes for tensor in (*prompts.caches, *graphs.caches, prompts.table))
        return DecodeCost(cached_bytes, graphs.arena_bytes())

    def reset(self) -> None:
        """Forget the prompts that were read, because the weights have changed."""
        self._prompts.reset()
        self._read = []

    def fill(self, slot: int, prompt: Sequence[int], shared: int = 0) -> np.ndarray:
        """Read a prompt into a slot, and return the logits of the next token: valid until the next call.

        The next prompt shares the first `shared` tokens; a recurrent model saves its state there.
        """
        prompt = list(prompt)
        if prompt != self._read:
            self._logits, self._read = self._read_prompt(prompt, shared), prompt
        for copy, program in zip(self._graphs.copies, self._copies, strict=True):
            targets = (
                np.array([slot]) if copy is self._graphs.state_copy else self._rows_of(slot, len(prompt))
            )
            for first in range(0, len(targets), size := copy.source_rows.size):
                rows = np.minimum(np.arange(first, first + size), len(targets) - 1)
                program.write(copy.source_rows, rows)
                program.write(copy.target_rows, targets[rows])
                program()
        self._positions[slot] = len(prompt)
        return self._logits

    def _read_prompt(self, prompt: list[int], shared: int) -> np.ndarray:
        """Return the logits of the token behind a prompt."""
        chunk = self._graphs.chunk
        position = self._prompts.rewind(prompt, chunk)
        saved = shared - shared % chunk
        if self.h.is_recurrent and position < saved < len(prompt):
            self._prompts.feed(prompt[position:saved])
            self._prompts.save_state()
            position = saved
        return self._prompts.feed(prompt[position:]).copy()

    def _rows_of(self, slot: int, count: int) -> np.ndarray:
        """Return the rows of the caches that the first tokens of a slot take."""
        return slot * self.ctx + np.arange(count)

    def step(self, tokens: Mapping[int, int]) -> np.ndarray:
        """Feed a token to each of some slots; return a row of logits for every slot, valid until the next call."""
        ids, positions = np.zeros((self.slots, 1), np.int64), np.zeros((self.slots, 1), np.int64)
        for slot, token in tokens.items():
            ids[slot], positions[slot] = token, self._positions[slot]
            self._positions[slot] += 1
        step = self._graphs.step
        self._step.write(step.tokens, ids)
        self._step.write(step.positions, positions)
        self._step.write(step.starts, 0)
        self._step.write(step.token_index, np.arange(self.slots))
        self._step.write(step.cache_rows, positions + np.arange(self.slots)[:, None] * self.ctx)
        self._step()
        return self._step.read(step.logits)


class BatchGraphs:
    """The graph of a step, and those that copy a prompt to a slot: its keys and values, and its states."""

    def __init__(self, prompts: DecodingGraphs, ctx: int, slots: int) -> None:
        h, self.prompts, self.chunk = prompts.h, prompts, prompts.chunks[-1]
        self.caches = make_caches(h, ctx, slots=slots)
        self.step: DecodingGraph = build_decoding(h, prompts.weights, 1, prompts.table, self.caches, slots)
        pairs = list(zip(prompts.caches, self.caches, strict=True))
        self.row_copy = copy_rows([pair for pair in pairs if not is_state(pair[0])], self.chunk)
        self.state_copy = copy_rows([pair for pair in pairs if is_state(pair[0])], 1)

    @property
    def copies(self) -> list[RowCopy]:
        """The copies that the model needs: one without states copies rows only."""
        return [copy for copy in (self.row_copy, self.state_copy) if copy.copied]

    @cached_property
    def plans(self) -> list[Plan]:
        """The memory plans of the step and of the copies."""
        outputs = [[self.step.logits], *(copy.copied for copy in self.copies)]
        return [self.prompts.plan_memory(each) for each in outputs]

    def arena_bytes(self) -> int:
        """Return the size of an arena that fits these graphs and those of prompts."""
        return max(self.prompts.arena_bytes(), *(each.arena for each in self.plans))


# ---- texts -----------------------------------------------------------------


@dataclass
class Text:
    """A request and the tokens that follow it."""

    index: int
    request: Request
    new: list[int] = field(default_factory=list)

    def find_limit(self, ctx: int) -> str:
        """Return "n" or "ctx" if no token can follow."""
        if len(self.new) == self.request.options.n:
            return "n"
        return "ctx" if len(self.request.tokens) + len(self.new) >= ctx else ""

    def add_token(self, logits: np.ndarray, ctx: int, ends: Collection[int], stops: Stops | None) -> str:
        """Draw the next token; return the reason if the text ends."""
        history = [*self.request.tokens, *self.new]
        token = draw_token(logits, self.request.options, len(self.new), history)
        if token in ends:
            return "end"
        self.new.append(token)
        return "stop" if stops and stops(self.index, token) else self.find_limit(ctx)

    def complete(self, reason: str) -> Completion:
        """Return the text, which ended for a reason."""
        return Completion(self.index, self.new, reason)


def complete(
    decoder: BatchDecoder,
    requests: Sequence[Request],
    ends: Collection[int] = (),
    stops: Stops | None = None,
) -> Iterator[Completion]:
    """Yield the completion of each request, in the order in which they finish.

    `ends` are tokens that end a text. `stops` sees each new token, and returns True to end the text behind it.
    """
    check_requests(decoder.h, requests)
    decoder.reset()
    texts = [Text(index, request) for index, request in enumerate(requests)]
    for text in texts:
        if reason := text.find_limit(decoder.ctx):
            yield text.complete(reason)
    waiting = deque(
        sorted(
            (text for text in texts if not text.find_limit(decoder.ctx)),
            key=lambda text: list(text.request.tokens),
        )
    )
    shared = [
        count_shared(text.request.tokens, following.request.tokens) for text, following in pairwise(waiting)
    ]
    shared_with_next = dict(zip((text.index for text in waiting), [*shared, 0], strict=False))
    running: dict[int, Text] = {}
    while waiting or running:
        for slot in range(decoder.slots):
            while waiting and slot not in running:
                text = waiting.popleft()
                logits = decoder.fill(slot, text.request.tokens, shared_with_next[text.index])
                if reason := text.add_token(logits, decoder.ctx, ends, stops):
                    yield text.complete(reason)
                else:
                    running[slot] = text
        if not running:
            break
        rows = decoder.step({slot: text.new[-1] for slot, text in running.items()})
        for slot, text in list(running.items()):
            if reason := text.add_token(rows[slot], decoder.ctx, ends, stops):
                del running[slot]
                yield text.complete(reason)


def check_requests(h: Hyperparameters, requests: Sequence[Request]) -> None:
    """Raise if a prompt is empty or has an unknown token, or if an option is not possible in a batch."""
    for number, request in enumerate(requests, 1):
        if not len(request.tokens):
            raise UsageError(
                f"prompt {number} of {len(requests)} has no tokens; give it at least one", code="no-prompt"
            )
        check_tokens(h, np.asarray(request.tokens, np.int64))
        if request.options.ctx_shift:
            raise UsageError(
                "the contexts of texts that are generated together cannot be shifted; choose a larger context",
                code="no-context-shift",
            )
