"""Reduces a step's gradient over all ranks, in a thread, while the backward pass runs.

A bucket is exchanged as soon as its part of the gradient is final: each rank sends its share of the other
ranks' segments, receives theirs of its own, and adds them in the order of the tree. All ranks process the
buckets in the same order.
"""

import threading
import time
from collections.abc import Iterable, Sequence

import numpy as np

from llamatrain.distributed.comm import Comm
from llamatrain.kernels.reference.registry import from_bf16, to_bf16
from llamatrain.platform.threads import start_thread
from llamatrain.train.parallel.accumulate import AccumulationPlan
from llamatrain.train.parallel.partition import Partition, TreeNode, joined

Sent = list[np.ndarray]  # to one rank, or from it


class TreeReduce:
    """A tree reduction of gradient buckets over ranks."""

    def __init__(
        self,
        world: Comm,
        division: Partition,
        turns: AccumulationPlan,
        vectors: Sequence[np.ndarray],
        half: bool,
    ) -> None:
        """Allocate the receive buffer.

        `vectors` hold the sums as the last group leaves them; with `half` they are sent in bf16.
        """
        self.world, self.division, self.turns, self.vectors, self.half = world, division, turns, vectors, half
        self._numbers = range(len(division.buckets))
        self._room_for = np.empty(
            division.room(division.rank), np.uint16 if half else np.float32
        )  # what comes
        self._news = threading.Condition()
        self._final = set[int]()  # buckets of this step
        self._thread: threading.Thread | None = None  # while the last turn is under way
        self._failed: BaseException | None = None

    # ---- by the thread that computes ---------------------------------------

    def begin(self) -> None:
        """Start the thread for the last group of a step."""
        self._final, self._failed = set(), None
        self._thread = threading.Thread(target=self._exchange, name="llamatrain-exchange", daemon=True)
        start_thread(self._thread)

    def ready(self, bucket: int) -> None:
        """Mark a bucket as final, if the last group is running."""
        self._tell([bucket])

    def finish(self) -> float:
        """Wait for the thread; then vector 0 has the sums of the own segments. Return the seconds waited."""
        start = time.perf_counter()
        self._tell(self._numbers)
        if self._thread:
            self._thread.join()
            self._thread = None
        if self._failed:
            raise self._failed
        return time.perf_counter() - start

    def give_up(self) -> None:
        """Stop the thread: the step failed."""
        with self._news:
            self._failed = self._failed or RuntimeError("the step was given up")
            self._news.notify()

    def _tell(self, buckets: Iterable[int]) -> None:
        if self._thread:
            with self._news:
                self._final.update(buckets)
                self._news.notify()

    # ---- by its own --------------------------------------------------------

    def _exchange(self) -> None:
        try:
            for number in self._numbers:
                with self._news:
                    while number not in self._final and not self._failed:
                        self._news.wait()
                if self._failed:
                    return
                self.world.doing(None, f"bucket {number + 1} of {len(self._numbers)}")
                self._sum(number)
        except BaseException as error:
            self._failed = error

    def _sum(self, number: int) -> None:
        division, vectors = self.division, self.vectors
        whole = joined(cut for segment in division.buckets[number] for cut in segment)
        for to, what in self.turns.turns[-1].added:
            for run in whole:
                vectors[to][run] += vectors[what][run]
        mine = [
            (branch, [vectors[vector][run] for run in division.runs(number, division.rank)])
            for branch, vector in self.sums
        ]
        parts = mine + (self._swapped(number) if division.ranks > 1 else [])
        found = added(sorted(parts, key=lambda part: part[0]))
        for run, values in zip(division.runs(number, division.rank), found, strict=True):
            if values.ctypes.data != vectors[0][run].ctypes.data:
                vectors[0][run] = values

    @property
    def sums(self) -> list[tuple[TreeNode, int]]:
        """The tree nodes of this rank, and the vectors with their sums."""
        return self.turns.sums

    def _swapped(self, number: int) -> list[tuple[TreeNode, Sent]]:
        """Exchange a bucket: return the other ranks' values in this rank's segments."""
        division, runs = self.division, self.division.runs(number, self.division.rank)
        out, into, came, at = list[Sent](), list[Sent](), list[tuple[TreeNode, Sent]](), 0
        for rank, theirs in enumerate(division.branches):
            out.append([])
            into.append([])
            if rank == division.rank:
                continue
            sent = (
                self.vectors[vector][run] for _, vector in self.sums for run in division.runs(number, rank)
            )
            out[-1] = [to_bf16(each) for each in sent] if self.half else list(sent)
            for branch in theirs:
                parts = list[np.ndarray]()
                for run in runs:
                    parts.append(self._room_for[at : at + run.stop - run.start])
                    at += run.stop - run.start
                into[-1] += parts
                came.append((branch, parts))
        self.world.met()
        self.world.swap(out, into)
        return [
            (branch, [from_bf16(part) if self.half else part for part in parts]) for branch, parts in came
        ]


def added(parts: Sequence[tuple[TreeNode, Sent]]) -> Sent:
    """Add tree nodes in order; the array of each left child is overwritten."""
    waiting = list[tuple[TreeNode, Sent]]()
    for branch, values in parts:
        while waiting and waiting[-1][0].joins(branch):
            left, sums = waiting.pop()
            for one, other in zip(sums, values, strict=True):
                one += other
            branch, values = left.joined(), sums
        waiting.append((branch, values))
    ((_, found),) = waiting
    return found
