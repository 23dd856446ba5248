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

MIN_PREFETCH = 4  # batches, at least all of a step: packing yields several at once
EXIT_TIMEOUT = 5.0  # seconds to wait for the thread at the end, even if the disk hangs


def prefetch_count(batches: int) -> int:
    """Return how many batches to keep ready for steps of `batches` micro-batches."""
    return max(batches, MIN_PREFETCH)


def wait_clock(loader: Batches) -> float:
    """Return the seconds spent waiting for data so far (wall clock if there is no prefetch thread)."""
    return loader.seconds_waited if isinstance(loader, Prefetcher) else time.perf_counter()


class Prefetcher:
    """A context manager that prefetches up to `ready` of the `remaining` batches to come."""

    def __init__(self, loader: Batches, count: int, ready: int, remaining: int) -> None:
        self.loader, self.state = loader, loader.state
        self.seconds_waited = 0.0  # total
        self._count, self._remaining = count, remaining
        self._requests = SimpleQueue[bool]()
        self._results = SimpleQueue[tuple[Batch, CursorState] | BaseException]()
        self._ready, self._in_flight = ready, 0
        self._thread = Thread(target=self._read_batches, daemon=True)

    def __enter__(self) -> Self:
        start_thread(self._thread)
        for _ in range(self._ready):
            self._request()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._requests.put(False)
        self._thread.join(EXIT_TIMEOUT)

    def batch(self, count: int) -> Batch:
        """Return the next batch, which must have the announced number of rows."""
        if not self._in_flight or count != self._count:
            raise RuntimeError(
                f"{count} rows were not announced: {self._in_flight} batches of {self._count} are in flight"
            )
        result = self._next()
        if isinstance(result, BaseException):
            self._results.put(result)
            raise result
        self._in_flight -= 1
        self._request()
        batch, self.state = result
        return batch

    def _next(self) -> tuple[Batch, CursorState] | BaseException:
        if not self._results.empty():
            return self._results.get()
        start = time.perf_counter()
        result = self._results.get()
        self.seconds_waited += time.perf_counter() - start
        return result

    def one_epoch(self, count: int, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        """Yield all rows once, without prefetching."""
        return self.loader.one_epoch(count, rank, ranks)

    def _request(self) -> None:
        if self._remaining:
            self._remaining -= 1
            self._in_flight += 1
            self._requests.put(True)

    def _read_batches(self) -> None:
        try:
            while self._requests.get():
                self._results.put((self.loader.batch(self._count), self.loader.state))
        except BaseException as error:
            self._results.put(error)
