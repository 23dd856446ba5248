"""Of each step's micro-batches those that are this process's own; the others' rows are gone past unread."""

from collections.abc import Iterator

from llamatrain.data.batches import Batch, CursorState
from llamatrain.train.protocols import SkippableLoader


class BatchShard:
    """Each step is of so many batches, of which `own` are given out, in order.

    The rows stand at the step's begin until the first of them is asked for, and at its end once the last was given.
    """

    def __init__(self, rows: SkippableLoader, batches: int, own: range) -> None:
        if not 0 <= own.start < own.stop <= batches or own.step != 1:
            raise ValueError(f"{own} of {batches} batches: each process has some, one after the other")
        self.rows, self.batches, self.own = rows, batches, own
        self._next = own.start

    @property
    def state(self) -> CursorState:
        return self.rows.state

    def batch(self, count: int) -> Batch:
        if self._next == self.own.start:
            self.rows.skip(count * self._next)
        batch = self.rows.batch(count)
        self._next += 1
        if self._next == self.own.stop:
            self.rows.skip(count * (self.batches - self._next))
            self._next = self.own.start
        return batch

    def once(self, count: int, mine: int = 0, of: int = 1) -> Iterator[Batch]:
        return self.rows.once(count, mine, of)
