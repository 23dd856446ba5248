"""Datasets of preferences: each line has a chosen and a rejected answer, one of which may be missing."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from llamatrain.data.dataset import Dataset, Sample, Shard


@dataclass(frozen=True)
class PairShard(Shard):
    """A shard of pairs. Each pair is one sample, counted at its chosen answer."""

    @cached_property
    def counts(self) -> np.ndarray:
        """The number of samples per document: 1 for the chosen answer of a complete pair."""
        both = (self.reachable_counts > 0).reshape(-1, 2).all(axis=1)
        return np.stack([both, np.zeros_like(both)], axis=1).reshape(-1).astype(np.int64)

    @property
    def is_used(self) -> np.ndarray:
        """True for both answers of complete pairs."""
        return np.repeat(self.counts[::2] > 0, 2)

    @property
    def is_untrained(self) -> np.ndarray:
        """True for documents that give no sample; a pair counts once."""
        return super().is_untrained & self._first

    @property
    def is_truncated(self) -> np.ndarray:
        """True for pairs with an answer that is too long; a pair counts once."""
        return np.repeat(super().is_truncated.reshape(-1, 2).any(axis=1), 2) & self._first

    @property
    def _first(self) -> np.ndarray:
        """True for the first answer of each line, so that a line is reported once."""
        return np.arange(len(self.documents)) % 2 == 0


@dataclass(frozen=True)
class LabelledShard(Shard):
    """A shard of labelled answers. Each answer is a sample."""

    @property
    def is_untrained(self) -> np.ndarray:
        """True for answers that exist but give no sample."""
        return super().is_untrained & (self.documents["size"] > 0)


class PreferenceDataset(Dataset):
    """A dataset of preferences."""

    def is_chosen(self, number: int) -> bool:
        """Return True if a labelled answer is a chosen one."""
        return self._locate(number)[1] % 2 == 0

    def pair(self, number: int) -> tuple[Sample, Sample]:
        """Return the chosen and the rejected answer of a pair."""
        part, index = self._locate(number)
        return part.read_document(index), part.read_document(index + 1)

    def pair_sizes(self, number: int) -> list[int]:
        """Return the number of tokens of both answers."""
        part, index = self._locate(number)
        sizes: list[int] = part.documents["size"][index : index + 2].tolist()
        return sizes

    def _locate(self, number: int) -> tuple[Shard, int]:
        part, number = self.locate(number)
        return part, int(np.searchsorted(part.ends, number, side="right"))
