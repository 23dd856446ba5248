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
from llamatrain.train.parallel.partition import Partition, TreeNode, merge_ranges

Arrays = list[np.ndarray]  # to or from one rank


class TreeReduce:
    """A tree reduction of gradient buckets over ranks."""

    def __init__(
        self,
        comm: Comm,
        partition: Partition,
        accumulation: AccumulationPlan,
        vectors: Sequence[np.ndarray],
        bf16: bool,
    ) -> None:
        """Allocate the receive buffer.

        `vectors` hold the sums as the last group leaves them; with `bf16` they are sent in that type.
        """
        self.comm = comm
        self.partition = partition
        self.accumulation = accumulation
        self.vectors = vectors
        self.bf16 = bf16
        self._buckets = range(len(partition.buckets))
        # for one bucket
        self._receive_buffer = np.empty(
            partition.receive_size(partition.rank), np.uint16 if bf16 else np.float32
        )
        self._condition = threading.Condition()
        self._final = set[int]()  # final buckets of this step
        self._thread: threading.Thread | None = None  # while the last group runs
        self._failed: BaseException | None = None

    # ---- called by the computing thread ---------------------------------------

    def start(self) -> None:
        """Start the thread for the last group of a step."""
        self._final, self._failed = set(), None
        self._thread = threading.Thread(target=self._run, name="llamatrain-exchange", daemon=True)
        start_thread(self._thread)

    def mark_final(self, bucket: int) -> None:
        """Mark a bucket as final, if the last group is running."""
        self._mark([bucket])

    def finish(self) -> float:
        """Wait for the thread; then vector 0 has the sums of the own segments. Return the seconds waited."""
        start = time.perf_counter()
        self._mark(self._buckets)
        if self._thread:
            self._thread.join()
            self._thread = None
        if self._failed:
            raise self._failed
        return time.perf_counter() - start

    def cancel(self) -> None:
        """Stop the thread: the step failed."""
        with self._condition:
            self._failed = self._failed or RuntimeError("the step failed")
            self._condition.notify()

    def _mark(self, buckets: Iterable[int]) -> None:
        if self._thread:
            with self._condition:
                self._final.update(buckets)
                self._condition.notify()

    # ---- in its own thread --------------------------------------------------------

    def _run(self) -> None:
        try:
            for bucket in self._buckets:
                with self._condition:
                    while bucket not in self._final and not self._failed:
                        self._condition.wait()
                if self._failed:
                    return
                self.comm.set_status(None, f"bucket {bucket + 1} of {len(self._buckets)}")
                self._reduce_bucket(bucket)
        except BaseException as error:
            self._failed = error

    def _reduce_bucket(self, bucket: int) -> None:
        partition, vectors = self.partition, self.vectors
        ranges = merge_ranges(cut for segment in partition.buckets[bucket] for cut in segment)
        for to, source in self.accumulation.groups[-1].additions:
            for run in ranges:
                vectors[to][run] += vectors[source][run]
        own_nodes = [
            (node, [vectors[vector][run] for run in partition.bucket_ranges(bucket, partition.rank)])
            for node, vector in self.sums
        ]
        nodes = own_nodes + (self._exchange_nodes(bucket) if partition.ranks > 1 else [])
        sums = add_nodes(sorted(nodes, key=lambda part: part[0]))
        for run, values in zip(partition.bucket_ranges(bucket, partition.rank), sums, strict=True):
            if values.ctypes.data != vectors[0][run].ctypes.data:
                vectors[0][run] = values

    @property
    def sums(self) -> list[tuple[TreeNode, int]]:
        """The tree nodes of this rank, and the vectors with their sums."""
        return self.accumulation.sums

    def _exchange_nodes(self, bucket: int) -> list[tuple[TreeNode, Arrays]]:
        """Exchange a bucket: return the other ranks' values in this rank's segments."""
        partition, runs = self.partition, self.partition.bucket_ranges(bucket, self.partition.rank)
        out, into, received, offset = list[Arrays](), list[Arrays](), list[tuple[TreeNode, Arrays]](), 0
        for rank, nodes in enumerate(partition.rank_nodes):
            out.append([])
            into.append([])
            if rank == partition.rank:
                continue
            sent = (
                self.vectors[vector][run]
                for _, vector in self.sums
                for run in partition.bucket_ranges(bucket, rank)
            )
            out[-1] = [to_bf16(array) for array in sent] if self.bf16 else list(sent)
            for node in nodes:
                parts = list[np.ndarray]()
                for run in runs:
                    parts.append(self._receive_buffer[offset : offset + run.stop - run.start])
                    offset += run.stop - run.start
                into[-1] += parts
                received.append((node, parts))
        self.comm.barrier()
        self.comm.all_to_all(out, into)
        return [
            (node, [from_bf16(part) if self.bf16 else part for part in parts]) for node, parts in received
        ]


def add_nodes(nodes: Sequence[tuple[TreeNode, Arrays]]) -> Arrays:
    """Add tree nodes in order; the array of each left child is overwritten."""
    waiting = list[tuple[TreeNode, Arrays]]()
    for node, values in nodes:
        while waiting and waiting[-1][0].is_left_sibling_of(node):
            left, sums = waiting.pop()
            for one, other in zip(sums, values, strict=True):
                one += other
            node, values = left.parent(), sums
        waiting.append((node, values))
    ((_, total),) = waiting
    return total
