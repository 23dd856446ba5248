"""Reads only this process's micro-batches of each step, and skips the rows of other ranks."""

from collections.abc import Iterator

from llamatrain.data.batches import Batch, CursorState
from llamatrain.train.protocols import SkippableLoader


class BatchShard:
    """A loader that returns the `own` batches of each step, in order.

    The position stays at the beginning of the step until its first batch is requested, and moves to the end
    of the step with the last one.
    """

    def __init__(self, loader: SkippableLoader, batches: int, own: range) -> None:
        if not 0 <= own.start < own.stop <= batches or own.step != 1:
            raise ValueError(f"{own} of {batches} batches: each process has some, one after the other")
        self.loader, self.batches, self.own = loader, batches, own
        self._next = own.start

    @property
    def state(self) -> CursorState:
        """The position in the data."""
        return self.loader.state

    def batch(self, count: int) -> Batch:
        """Return the next of the own batches."""
        if self._next == self.own.start:
            self.loader.skip(count * self._next)
        batch = self.loader.batch(count)
        self._next += 1
        if self._next == self.own.stop:
            self.loader.skip(count * (self.batches - self._next))
            self._next = self.own.start
        return batch

    def one_epoch(self, count: int, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        """Yield all rows once, without sharding by step."""
        return self.loader.one_epoch(count, rank, ranks)
