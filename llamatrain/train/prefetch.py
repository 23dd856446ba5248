"""Reads the batches of the next step in a thread while the present step runs.

The batches are the same as without the thread, and `state` is that of the last batch taken: batches waiting
in the queue are not part of a run's state. An error is raised by the step that would have used the batch.
"""

import time
from collections.abc import Iterator
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Self

from llamatrain.data.batches import Batch, CursorState
from llamatrain.platform.threads import start_thread
from llamatrain.train.protocols import Batches

READY = 4  # batches at least, and all of a step: those of a window that is packed come at once
LEAVING = (
    5.0  # seconds that a batch under way may take at the end; a disk that never answers ends no less a run
)


def ready(batches: int) -> int:
    """Return how many batches to keep ready for steps of `batches` micro-batches."""
    return max(batches, READY)


def waited(rows: Batches) -> float:
    """Return the seconds spent waiting for data so far (wall clock if there is no prefetch thread)."""
    return rows.waited if isinstance(rows, ReadAhead) else time.perf_counter()


class ReadAhead:
    """A context manager that prefetches up to `ready` of the `left` batches that will be requested."""

    def __init__(self, rows: Batches, count: int, ready: int, left: int) -> None:
        self.rows, self.state = rows, rows.state
        self.waited = 0.0  # seconds, in all
        self._count, self._left = count, left
        self._wanted, self._made = (
            SimpleQueue[bool](),
            SimpleQueue[tuple[Batch, CursorState] | BaseException](),
        )
        self._ready, self._under_way = ready, 0
        self._thread = Thread(target=self._make, daemon=True)

    def __enter__(self) -> Self:
        start_thread(self._thread)
        for _ in range(self._ready):
            self._want()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wanted.put(False)
        self._thread.join(LEAVING)

    def batch(self, count: int) -> Batch:
        """Return the next batch, which must have the announced number of rows."""
        if not self._under_way or count != self._count:
            raise RuntimeError(
                f"{count} rows were not announced: {self._under_way} batches of {self._count} are under way"
            )
        made = self._next()
        if isinstance(made, BaseException):
            self._made.put(made)
            raise made
        self._under_way -= 1
        self._want()
        batch, self.state = made
        return batch

    def _next(self) -> tuple[Batch, CursorState] | BaseException:
        if not self._made.empty():
            return self._made.get()
        start = time.perf_counter()
        made = self._made.get()
        self.waited += time.perf_counter() - start
        return made

    def once(self, count: int, mine: int = 0, of: int = 1) -> Iterator[Batch]:
        """Yield all rows once, without prefetching."""
        return self.rows.once(count, mine, of)

    def _want(self) -> None:
        if self._left:
            self._left -= 1
            self._under_way += 1
            self._wanted.put(True)

    def _make(self) -> None:
        try:
            while self._wanted.get():
                self._made.put((self.rows.batch(self._count), self.rows.state))
        except BaseException as error:
            self._made.put(error)
