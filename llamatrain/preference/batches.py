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
from llamatrain.preference.dataset import PreferenceDataset


class PairBatches(Batches):
    """Batches of pairs: chosen and rejected answer in one row."""

    dataset: PreferenceDataset

    @property
    def room(self) -> int:
        """The number of tokens of a row, for two answers."""
        return 2 * self.ctx

    def _segments(self, index: int) -> Row:
        return [
            self._segment(*self._with_bos(tokens, weights))
            for tokens, weights, _ in self.dataset.pair(self.order[index])
        ]

    def _sizes_in_row(self, numbers: np.ndarray) -> list[int]:
        has_bos, pairs = self.dataset.bos is not None, map(self.dataset.pair_sizes, numbers.tolist())
        return [sum(min(size - 1 + has_bos, self.ctx) for size in sizes) for sizes in pairs]

    def to_arrays(self, rows: list[Row], length: int) -> Batch:
        """Return the batch, with the answer that each token belongs to."""
        batch = super().to_arrays(rows, length)
        half, pairs = batch.tokens.size // 2, 0
        sequences, chosen = np.zeros(batch.tokens.shape, np.int32), np.zeros(batch.tokens.shape, bool)
        for index, row in enumerate(rows):
            for segment, begin, end in segment_spans(row):
                rejected = segment % 2
                sequences[index, begin:end] = pairs + half * rejected
                chosen[index, begin:end] = not rejected
                pairs += rejected
        sides = np.zeros(half, np.float32)
        sides[:pairs] = 1
        return replace(batch, answers=PreferenceBatch(sequences, chosen, sides), samples=pairs)


class KtoBatches(Batches):
    """Batches of labelled answers. Until a batch is collated, rejected answers have negative weights."""

    dataset: PreferenceDataset

    def __init__(
        self,
        dataset: PreferenceDataset,
        options: DataOptions,
        seed: int,
        eos: int | None = None,
        bos: int | None = None,
    ) -> None:
        super().__init__(dataset, replace(options, pack=False), seed, eos, bos)

    def _segments(self, index: int) -> Row:
        number = self.order[index]
        tokens, weights, _ = self.dataset[number]
        return [
            self._segment(*self._with_bos(tokens, weights if self.dataset.is_chosen(number) else -weights))
        ]

    def collate(self, rows: list[Row]) -> Batch:
        """Return the batch, with the mismatched answers for KTO's reference point."""
        mismatched = list(self._mismatched_rows(rows))
        length = max(self.length_for(rows), self.length_for(mismatched))
        batch = self._with_labels(rows, length)
        assert batch.answers
        return replace(batch, answers=replace(batch.answers, others=self._with_labels(mismatched, length)))

    def _with_labels(self, rows: list[Row], length: int) -> Batch:
        batch = self.to_arrays(rows, length)
        sides = np.sign(batch.weights.sum(axis=1))
        sequences = np.repeat(np.arange(len(rows), dtype=np.int32)[:, None], length, axis=1)
        chosen = np.zeros(sequences.shape, bool)
        return replace(
            batch,
            weights=np.abs(batch.weights),
            answers=PreferenceBatch(sequences, chosen, sides.astype(np.float32)),
        )

    def _mismatched_rows(self, rows: list[Row]) -> Iterator[Row]:
        filled = [row for row in rows if row]
        previous = iter([*filled[-1:], *filled[:-1]])
        yield from ([self._with_answer_of(row[0], next(previous)[0])] if row else [] for row in rows)

    def _with_answer_of(self, segment: Segment, other: Segment) -> Segment:
        """Return the prompt of one segment with the answer of another."""
        prompt, answer = prompt_length(segment), prompt_length(other)
        tokens = np.concatenate([segment.tokens[: prompt + 1], other.targets[answer:]])
        weights = np.concatenate([np.zeros(prompt + 1), np.abs(other.weights[answer:])])
        return self._segment(tokens, weights)


def prompt_length(segment: Segment) -> int:
    """Return the number of targets before the answer."""
    return int(np.argmax(segment.weights != 0))


def segment_spans(row: Row) -> Iterator[tuple[int, int, int]]:
    """Yield index, begin and end of each segment of a row."""
    begin = 0
    for index, segment in enumerate(row):
        end = begin + len(segment.tokens)
        yield index, begin, end
        begin = end
