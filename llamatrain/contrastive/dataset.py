"""Datasets of groups: the documents of a line are a query, a text that answers it, and texts that do not."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from llamatrain.data.dataset import Dataset, Shard


@dataclass(frozen=True)
class GroupShard(Shard):
    """A shard of groups. Each group is one sample, counted at its query."""

    @cached_property
    def is_first(self) -> np.ndarray:
        """True for the first document of each line."""
        lines = self.documents[["file", "line"]]
        return np.concatenate([np.ones(min(1, len(lines)), bool), lines[1:] != lines[:-1]])

    @cached_property
    def group_sizes(self) -> np.ndarray:
        """The number of documents of the group that each document belongs to; 0 if one of them is empty."""
        if not len(self.documents):
            return np.zeros(0, np.int64)
        firsts = np.flatnonzero(self.is_first)
        sizes = np.diff(firsts, append=len(self.documents))
        is_complete = np.minimum.reduceat(self.documents["size"], firsts) > 0
        return np.repeat(sizes * is_complete, sizes)

    @cached_property
    def counts(self) -> np.ndarray:
        """The number of samples per document: 1 for the query of a group."""
        return (self.is_first & self.is_used).astype(np.int64)

    @property
    def is_used(self) -> np.ndarray:
        """True for all documents of groups."""
        return self.group_sizes > 0

    @property
    def is_untrained(self) -> np.ndarray:
        """True for documents that give no sample; a line counts once."""
        return super().is_untrained & self.is_first

    @property
    def is_truncated(self) -> np.ndarray:
        """True for groups with a text that is too long; a group counts once."""
        is_long = self.documents["size"] > self.ctx - self.bos_count
        groups = np.cumsum(self.is_first) - 1
        any_long = np.bincount(groups, is_long) > 0 if len(groups) else is_long
        return any_long[groups] & self.is_used & self.is_first


class GroupDataset(Dataset):
    """A dataset of groups."""

    def __init__(self, shards: Sequence[Shard], ctx: int, bos: int | None) -> None:
        super().__init__(shards, ctx, bos)
        sizes = [shard.group_sizes.max(initial=0) for shard in shards if isinstance(shard, GroupShard)]
        self.texts_per_row = int(max(sizes, default=0))  # the most of a group; may be raised

    def group(self, number: int) -> list[np.ndarray]:
        """Return the tokens of each text of a group."""
        shard, number = self.locate(number)
        assert isinstance(shard, GroupShard)
        first = int(np.searchsorted(shard.ends, number, side="right"))
        return [shard.read_document(first + index).tokens for index in range(shard.group_sizes[first])]
