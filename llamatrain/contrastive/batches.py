"""Batches of groups: a row has all texts of a group, and the tokens of each text see that text alone."""

from dataclasses import replace

import numpy as np

from llamatrain.contrastive.dataset import GroupDataset
from llamatrain.data.batches import Batch, Batches, Row, Segment, TextBatch
from llamatrain.data.options import DataOptions


class GroupBatches(Batches):
    """Batches of groups."""

    dataset: GroupDataset

    def __init__(
        self,
        dataset: GroupDataset,
        options: DataOptions,
        seed: int,
        eos: int | None = None,
        bos: int | None = None,
    ) -> None:
        super().__init__(dataset, replace(options, pack=False), seed, eos, bos)

    @property
    def room(self) -> int:
        """The number of tokens of a row, for all texts of a group."""
        return self.dataset.texts_per_row * self.ctx

    def _segments(self, index: int) -> Row:
        return [self._whole_text(tokens) for tokens in self.dataset.group(self.order[index])]

    def _whole_text(self, tokens: np.ndarray) -> Segment:
        return whole_text(tokens, self.ctx, self.dataset.bos, self.eos)

    def to_arrays(self, rows: list[Row], length: int) -> Batch:
        """Return the batch, with the place of each text."""
        return add_places(super().to_arrays(rows, length), rows, self.dataset.texts_per_row)


def whole_text(tokens: np.ndarray, ctx: int, bos: int | None, eos: int | None) -> Segment:
    """Return a text with its begin token. One that is too long loses what precedes its end token."""
    if bos is not None:
        tokens = np.concatenate([[bos], tokens])
    if len(tokens) > ctx:
        end = tokens[-1:] if tokens[-1] == eos else tokens[:0]
        tokens = np.concatenate([tokens[: ctx - len(end)], end])
    return Segment(tokens, tokens, np.ones(len(tokens), np.float32))


def add_places(batch: Batch, rows: list[Row], texts: int) -> Batch:
    """Return a batch with the place of each text; a row has up to `texts` of them."""
    numbers = np.zeros(batch.tokens.shape, np.int32)
    firsts, lasts = (np.zeros((len(rows), texts), np.int32) for _ in range(2))
    present = np.zeros((len(rows), texts), bool)
    for index, row in enumerate(rows):
        sizes = [len(segment.tokens) for segment in row]
        ends = np.cumsum(sizes, dtype=np.int32)
        firsts[index, : len(row)], lasts[index, : len(row)] = ends - sizes, ends - 1
        present[index, : len(row)] = True
        numbers[index, : sum(sizes)] = np.repeat(np.arange(len(row)), sizes)
    places = TextBatch(numbers=numbers, firsts=firsts, lasts=lasts, present=present)
    return replace(batch, texts=places, samples=sum(map(bool, rows)))
