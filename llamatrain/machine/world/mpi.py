"""Processes that MPI joins."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
from mpi4py import MPI

from llamatrain.errors import LlamatrainError, words_of

T = TypeVar("T")
LOOKS, LOOK = 100, 0.0002  # at once; and then the seconds between two of them


class Elsewhere(LlamatrainError):
    """What another process has met; all know it."""

    shared = True

    def __init__(self, words: str, exit_code: int) -> None:
        super().__init__(words)
        self.exit_code = exit_code


class Mpi:
    def __init__(self) -> None:
        self._all = MPI.COMM_WORLD.Dup()  # of whoever leads a run
        self._data = MPI.COMM_WORLD.Dup()  # of the thread that exchanges beside it
        self._here = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
        self.rank, self.size = self._all.rank, self._all.size
        self.here, self.ranks_here = self._here.rank, self._here.size
        own = os.sched_getaffinity(0)
        self.sharing = sum(not own.isdisjoint(each) for each in self._here.allgather(own))

    def gathered(self, mine: T) -> list[T]:
        quietly(self._all.Ibarrier())
        return self._all.allgather(mine)

    def from_first(self, mine: T) -> T:
        quietly(self._all.Ibarrier())
        return self._all.bcast(mine)

    @contextmanager
    def in_turn(self, what: str) -> Iterator[None]:
        if self.here:
            self._here.Barrier()
        try:
            yield
        finally:
            if not self.here:
                self._here.Barrier()

    @contextmanager
    def agreed(self) -> Iterator[None]:
        failed: Exception | None = None
        try:
            yield
        except (LlamatrainError, OSError, MemoryError) as error:
            if getattr(error, "shared", False):
                raise
            failed = error
        mine = (words_of(failed), getattr(failed, "exit_code", 1)) if failed else None
        told = self.gathered(mine)
        rank, first = next(((rank, each) for rank, each in enumerate(told) if each), (0, None))
        if first is None:
            return
        if failed and mine == first:
            if isinstance(failed, LlamatrainError):
                failed.shared = True
            raise failed
        words, code = first
        raise Elsewhere(words if all(each == first for each in told) else f"rank {rank}: {words}", code)

    def met(self) -> None:
        quietly(self._data.Ibarrier())

    def swap(self, out: Sequence[Sequence[np.ndarray]], into: Sequence[Sequence[np.ndarray]]) -> None:
        requests = []
        for step in range(1, self.size):
            source, to = (self.rank - step) % self.size, (self.rank + step) % self.size
            requests += [self._data.Irecv(each.view(np.uint8), source) for each in into[source]]
            requests += [self._data.Isend(each.view(np.uint8), to) for each in out[to]]
        MPI.Request.Waitall(requests)

    def send(self, array: np.ndarray, to: int) -> None:
        self._all.Send(array.view(np.uint8), to)

    def receive(self, into: np.ndarray, of: int) -> None:
        self._all.Recv(into.view(np.uint8), of)

    def end(self, code: int) -> None:
        MPI.COMM_WORLD.Abort(code)


def quietly(request: MPI.Request) -> None:
    """Who waits in MPI keeps a processor busy, which others may need for what is waited for."""
    for _ in range(LOOKS):
        if request.Test():
            return
    while not request.Test():
        time.sleep(LOOK)
