"""Batches of preference data: both answers of a pair in one row with separate attention, or one answer per row.

If answers are judged one by one (KTO), each batch also contains its prompts with the answer of the previous
row, truncated to the row: they measure how far the model moved for answers in general. The prompt of that row
may be the same; as in TRL, the answers are those of the batch, each once.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from llamatrain.data.batches import Batch, Batches, PreferenceBatch, Row, Segment
from llamatrain.data.options import DataOptions
from llamatrain.data.preference_records import Compare
from llamatrain.preference.dataset import PreferenceDataset


def rows_of(compare: Compare | None) -> type[Batches]:
    """Return the class of batches for a kind of data."""
    return {None: Batches, "pairs": PairBatches, "answers": KtoBatches}[compare]


class PairBatches(Batches):
    """Batches of pairs: chosen and rejected answer in one row."""

    corpus: PreferenceDataset

    @property
    def room(self) -> int:
        """The number of tokens of a row, for two answers."""
        return 2 * self.ctx

    def _pieces(self, place: int) -> Row:
        return [
            self._piece(*self._led(tokens, weights))
            for tokens, weights, _ in self.corpus.couple(self.order[place])
        ]

    def _lengths(self, numbers: np.ndarray) -> list[int]:
        lead, couples = self.corpus.lead is not None, map(self.corpus.couple_sizes, numbers.tolist())
        return [sum(min(size - 1 + lead, self.ctx) for size in sizes) for sizes in couples]

    def laid(self, rows: list[Row], length: int) -> Batch:
        """Return the batch, with the answer that each token belongs to."""
        batch = super().laid(rows, length)
        half, pairs = batch.tokens.size // 2, 0
        sequences, chosen = np.zeros(batch.tokens.shape, np.int32), np.zeros(batch.tokens.shape, bool)
        for number, row in enumerate(rows):
            for place, begin, end in places(row):
                rejected = place % 2
                sequences[number, begin:end] = pairs + half * rejected
                chosen[number, begin:end] = not rejected
                pairs += rejected
        sides = np.zeros(half, np.float32)
        sides[:pairs] = 1
        return replace(batch, compared=PreferenceBatch(sequences, chosen, sides), samples=pairs)


class KtoBatches(Batches):
    """Batches of labelled answers. Until a batch is collated, rejected answers have negative weights."""

    corpus: PreferenceDataset

    def __init__(
        self,
        corpus: PreferenceDataset,
        options: DataOptions,
        seed: int,
        eos: int | None = None,
        bos: int | None = None,
    ) -> None:
        super().__init__(corpus, replace(options, pack=False), seed, eos, bos)

    def _pieces(self, place: int) -> Row:
        number = self.order[place]
        tokens, weights, _ = self.corpus[number]
        return [self._piece(*self._led(tokens, weights if self.corpus.is_chosen(number) else -weights))]

    def lay(self, rows: list[Row]) -> Batch:
        """Return the batch, with the mismatched answers for KTO's reference point."""
        others = list(self._others(rows))
        length = max(self.length_for(rows), self.length_for(others))
        batch = self._told(rows, length)
        assert batch.compared
        return replace(batch, compared=replace(batch.compared, others=self._told(others, length)))

    def _told(self, rows: list[Row], length: int) -> Batch:
        batch = self.laid(rows, length)
        sides = np.sign(batch.weights.sum(axis=1))
        sequences = np.repeat(np.arange(len(rows), dtype=np.int32)[:, None], length, axis=1)
        chosen = np.zeros(sequences.shape, bool)
        return replace(
            batch,
            weights=np.abs(batch.weights),
            compared=PreferenceBatch(sequences, chosen, sides.astype(np.float32)),
        )

    def _others(self, rows: list[Row]) -> Iterator[Row]:
        there = [row for row in rows if row]
        before = iter([*there[-1:], *there[:-1]])
        yield from ([self._exchanged(row[0], next(before)[0])] if row else [] for row in rows)

    def _exchanged(self, one: Segment, other: Segment) -> Segment:
        """Return the prompt of one segment with the answer of another."""
        prompt, answer = prompt_of(one), prompt_of(other)
        tokens = np.concatenate([one.tokens[: prompt + 1], other.targets[answer:]])
        weights = np.concatenate([np.zeros(prompt + 1), np.abs(other.weights[answer:])])
        return self._piece(tokens, weights)


def prompt_of(piece: Segment) -> int:
    """Return the number of targets before the answer."""
    return int(np.argmax(piece.weights != 0))


def places(row: Row) -> Iterator[tuple[int, int, int]]:
    """Yield index, begin and end of each segment of a row."""
    begin = 0
    for number, piece in enumerate(row):
        end = begin + len(piece.tokens)
        yield number, begin, end
        begin = end
