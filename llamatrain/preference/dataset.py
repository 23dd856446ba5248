"""Documents that are compared: of each line the chosen answer and the rejected one, one of which may be missing."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from llamatrain.data.dataset import PLAIN, Dataset, DatasetKind, Sample, Shard
from llamatrain.data.preference_records import Compare


@dataclass(frozen=True)
class PairShard(Shard):
    """Each is one sample, counted with its chosen answer."""

    @cached_property
    def counts(self) -> np.ndarray:
        both = (self.within > 0).reshape(-1, 2).all(axis=1)
        return np.stack([both, np.zeros_like(both)], axis=1).reshape(-1).astype(np.int64)

    @property
    def used(self) -> np.ndarray:
        return np.repeat(self.counts[::2] > 0, 2)

    @property
    def unused(self) -> np.ndarray:
        return super().unused & self._first

    @property
    def long(self) -> np.ndarray:
        return np.repeat(super().long.reshape(-1, 2).any(axis=1), 2) & self._first

    @property
    def _first(self) -> np.ndarray:
        """A line is told of once."""
        return np.arange(len(self.documents)) % 2 == 0


@dataclass(frozen=True)
class LabelledShard(Shard):
    """Each is a sample."""

    @property
    def unused(self) -> np.ndarray:
        return super().unused & (self.documents["size"] > 0)


class PreferenceDataset(Dataset):
    def is_chosen(self, number: int) -> bool:
        return self._place(number)[1] % 2 == 0

    def couple(self, number: int) -> tuple[Sample, Sample]:
        """What is chosen and what is rejected."""
        part, place = self._place(number)
        return part.whole(place), part.whole(place + 1)

    def couple_sizes(self, number: int) -> list[int]:
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
