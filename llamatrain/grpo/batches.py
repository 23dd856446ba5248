"""Batches of prompts: each has as many rows, one after the other, as answers are generated to it.

The prompts of a run stay in memory. A row has the prompt's tokens, and no trained token until it is answered.
"""

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from llamatrain.data.batches import Batch, CursorState, PackingStats, Segment, collate_rows, row_lengths
from llamatrain.data.options import DataOptions
from llamatrain.data.shuffle import Order
from llamatrain.grpo.settings import Grpo

if TYPE_CHECKING:
    from llamatrain.data.prompt_records import Prompt


class PromptBatches:
    """Yields batches of prompts, epoch after epoch, and can resume at any row."""

    has_untrained_tokens = True

    def __init__(
        self,
        prompts: "Sequence[Prompt]",
        settings: Grpo,
        ctx: int,
        options: DataOptions,
        seed: int,
        padding: int,
    ) -> None:
        self.prompts, self.settings, self.ctx, self.padding = prompts, settings, ctx, padding
        self.lengths = answer_lengths(ctx, options)
        self._shuffles, self.seed = options.shuffle, seed
        self.fingerprint = fingerprint(prompts)
        self.restore(CursorState(seed))

    # ---- position in the data ----------------------------------------------

    @property
    def state(self) -> CursorState:
        """The position in the data, for a checkpoint."""
        prompt, answer = divmod(self._row, self.settings.num_generations)
        epoch, position = divmod(prompt, len(self.prompts))
        return CursorState(
            self.seed, epoch, position, answer, self.fingerprint, taken=int(answer > 0), end=self.end
        )

    def restore(self, state: CursorState) -> bool:
        """Continue at a saved position; return False if it belongs to other data."""
        is_same_data = state.fingerprint in ("", self.fingerprint)
        is_valid = state.position < len(self.prompts) and state.row < self.settings.num_generations
        if not (is_same_data and is_valid):
            state = CursorState(self.seed)
        self.seed, self.end = state.seed, state.end
        self._order = Order(len(self.prompts), self.seed, self._shuffles)
        prompt = state.epoch * len(self.prompts) + state.position
        self._row = prompt * self.settings.num_generations + state.row
        return is_same_data and is_valid

    def count(self, epochs: int) -> int:
        """Return the rows that are trained in a number of epochs."""
        settings = self.settings
        return epochs * len(self.prompts) * settings.num_generations * settings.num_iterations

    def measure_packing(self, count: int) -> PackingStats:
        """Return how full rows are: answers that do not exist yet are not counted."""
        return PackingStats(1.0, 1.0)

    # ---- rows ----------------------------------------------------------------

    def batch(self, count: int) -> Batch:
        """Return the next rows, padded after the last one."""
        prompts = [self._prompt(self._row + number) for number in range(count)]
        self._row += sum(prompt is not None for prompt in prompts)
        return self.collate(prompts)

    def _prompt(self, row: int) -> "Prompt | None":
        index = row // self.settings.num_generations
        if 0 < self.end * len(self.prompts) <= index:
            return None
        return self.prompts[self._order[index]]

    def skip(self, count: int) -> None:
        """Skip the next rows."""
        self._row += sum(self._prompt(self._row + number) is not None for number in range(count))

    def one_epoch(self, count: int, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        """Yield each prompt once, in the order of the files; with several ranks only every n-th batch."""
        for number, first in enumerate(range(0, len(self.prompts), count)):
            if number % ranks == rank:
                prompts = [*self.prompts[first : first + count]]
                yield self.collate([*prompts, *[None] * (count - len(prompts))])

    def collate(self, prompts: "Sequence[Prompt | None]") -> Batch:
        """Return a batch of prompts, in rows of the largest length."""
        rows = [[] if prompt is None else [untrained(prompt.tokens)] for prompt in prompts]
        batch = collate_rows(rows, self.ctx, self.padding)
        return replace(batch, prompts=prompts)


def answer_lengths(ctx: int, options: DataOptions) -> tuple[int, ...]:
    """Return the possible lengths of a batch of answers, each of which has a row of its own."""
    return row_lengths(ctx, replace(options, pack=False), full=False, plain=False)


def untrained(tokens: Sequence[int]) -> Segment:
    """Return tokens of which none is trained."""
    inputs = np.array(tokens, np.int32)
    return Segment(inputs, np.roll(inputs, -1), np.zeros(len(inputs), np.float32))


def fingerprint(prompts: "Sequence[Prompt]") -> str:
    """Return a checksum of prompts and their rows."""
    checksum = 0
    for prompt in prompts:
        text = json.dumps([prompt.tokens, prompt.row], default=str)
        checksum = zlib.crc32(text.encode(), checksum)
    return f"prompts {len(prompts)} {checksum:08x}"


def split_prompts(
    prompts: "Sequence[Prompt]", share: float, seed: int
) -> "tuple[list[Prompt], list[Prompt]]":
    """Split prompts into those for training and a share for validation, in the order of the files."""
    order = Order(len(prompts), seed)
    held_out = {order[index] for index in range(max(1, round(share * len(prompts))))}
    return (
        [prompt for number, prompt in enumerate(prompts) if number not in held_out],
        [prompt for number, prompt in enumerate(prompts) if number in held_out],
    )
