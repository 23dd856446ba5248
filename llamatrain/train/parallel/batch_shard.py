"""Reads only this process's micro-batches of each step, and skips the rows of other ranks."""

from collections.abc import Iterator

from llamatrain.data.batches import Batch, CursorState
from llamatrain.train.protocols import SkippableLoader


class BatchShard:
    """A loader that returns the `own` batches of each step, in order.

    The position stays at the beginning of the step until its first batch is requested, and moves to the end
    of the step with the last one.
    """

    def __init__(self, rows: SkippableLoader, batches: int, own: range) -> None:
        if not 0 <= own.start < own.stop <= batches or own.step != 1:
            raise ValueError(f"{own} of {batches} batches: each process has some, one after the other")
        self.rows, self.batches, self.own = rows, batches, own
        self._next = own.start

    @property
    def state(self) -> CursorState:
        """The position in the data."""
        return self.rows.state

    def batch(self, count: int) -> Batch:
        """Return the next of the own batches."""
        if self._next == self.own.start:
            self.rows.skip(count * self._next)
        batch = self.rows.batch(count)
        self._next += 1
        if self._next == self.own.stop:
            self.rows.skip(count * (self.batches - self._next))
            self._next = self.own.start
        return batch

    def once(self, count: int, mine: int = 0, of: int = 1) -> Iterator[Batch]:
        """Yield all rows once, without sharding by step."""
        return self.rows.once(count, mine, of)
