"""Datasets of preferences: each line has a chosen and a rejected answer, one of which may be missing."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from llamatrain.data.dataset import PLAIN, Dataset, DatasetKind, Sample, Shard
from llamatrain.data.preference_records import Compare


@dataclass(frozen=True)
class PairShard(Shard):
    """A shard of pairs. Each pair is one sample, counted at its chosen answer."""

    @cached_property
    def counts(self) -> np.ndarray:
        """The number of samples per document: 1 for the chosen answer of a complete pair."""
        both = (self.within > 0).reshape(-1, 2).all(axis=1)
        return np.stack([both, np.zeros_like(both)], axis=1).reshape(-1).astype(np.int64)

    @property
    def used(self) -> np.ndarray:
        """True for both answers of complete pairs."""
        return np.repeat(self.counts[::2] > 0, 2)

    @property
    def unused(self) -> np.ndarray:
        """True for documents that give no sample; a pair counts once."""
        return super().unused & self._first

    @property
    def long(self) -> np.ndarray:
        """True for pairs with an answer that is too long; a pair counts once."""
        return np.repeat(super().long.reshape(-1, 2).any(axis=1), 2) & self._first

    @property
    def _first(self) -> np.ndarray:
        """True for the first answer of each line, so that a line is reported once."""
        return np.arange(len(self.documents)) % 2 == 0


@dataclass(frozen=True)
class LabelledShard(Shard):
    """A shard of labelled answers. Each answer is a sample."""

    @property
    def unused(self) -> np.ndarray:
        """True for answers that exist but give no sample."""
        return super().unused & (self.documents["size"] > 0)


class PreferenceDataset(Dataset):
    """A dataset of preferences."""

    def is_chosen(self, number: int) -> bool:
        """Return True if a labelled answer is a chosen one."""
        return self._place(number)[1] % 2 == 0

    def couple(self, number: int) -> tuple[Sample, Sample]:
        """Return the chosen and the rejected answer of a pair."""
        part, place = self._place(number)
        return part.whole(place), part.whole(place + 1)

    def couple_sizes(self, number: int) -> list[int]:
        """Return the number of tokens of both answers."""
        part, place = self._place(number)
        found: list[int] = part.documents["size"][place : place + 2].tolist()
        return found

    def _place(self, number: int) -> tuple[Shard, int]:
        part, number = self.part_of(number)
        return part, int(np.searchsorted(part.ends, number, side="right"))


KINDS: dict[Compare | None, DatasetKind] = {
    None: PLAIN,
    "pairs": DatasetKind(PairShard, PreferenceDataset, "pairs"),
    "answers": DatasetKind(LabelledShard, PreferenceDataset, "answers"),
}
