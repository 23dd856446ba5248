"""The programs of a step that is sharded into groups and among ranks."""

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import numpy as np

from llamatrain.data.batches import Batch, StepTotals
from llamatrain.distributed.comm import Comm
from llamatrain.engine.device import Memory
from llamatrain.engine.profiler import phase
from llamatrain.graph.tensor import Tensor
from llamatrain.io.madvise import release_pages
from llamatrain.platform.memory import allocate
from llamatrain.train.graphs import StepGraph, StepGraphs
from llamatrain.train.parallel.accumulate import GroupStep, plan_accumulation
from llamatrain.train.parallel.gather import GatheredState
from llamatrain.train.parallel.partition import merge_ranges, rank_range
from llamatrain.train.parallel.reduce import TreeReduce
from llamatrain.train.programs import BoundGraph, DropoutKey, TrainPrograms
from llamatrain.train.rounded_weights import EncodeWeight

T = TypeVar("T")
EPSILON = 1e-6  # added to the norm, as in `clip_factor`


class ShardedPrograms(TrainPrograms):
    """Programs whose gradients are summed over groups and ranks.

    Each rank holds the optimizer states of its own segments, updates them, and sends the updated weights to
    all others.
    """

    def __init__(
        self,
        graphs: StepGraphs,
        arena: int,
        frozen: Mapping[str, Memory] | None = None,
        encode: EncodeWeight | None = None,
        *,
        comm: Comm,
        batches: int,
    ) -> None:
        """Allocate the vectors of the accumulation plan for `batches` micro-batches per step."""
        super().__init__(graphs, arena, frozen, encode)
        spec, partition = graphs.spec, graphs.partition
        assert self.grads
        self.comm, self.partition = comm, partition
        self.accumulation = plan_accumulation(
            rank_range(spec.groups, spec.ranks, spec.rank), spec.groups, batches
        )
        size = self.grads.vector.nbytes
        more = [allocate(size).view(np.float32) for _ in range(1, self.accumulation.vector_count)]
        self._vectors = [self.grads.vector, *more]
        self._reduce = TreeReduce(comm, partition, self.accumulation, self._vectors, spec.comm_bf16)
        self.exposed_seconds = 0.0
        for part in graphs.shard_slices if spec.rule else ():
            self.memory[part.key] = self.weights.slice_memory(part.start, part.stop)
            self.memory[f"{part.key}.grad"] = self.grads.slice_memory(part.start, part.stop)

    def local_microbatches(self, batches: int) -> range:
        """Return the indices of a step's micro-batches that this rank runs."""
        spec = self.spec
        groups = rank_range(spec.groups, spec.ranks, spec.rank)
        return range(
            rank_range(batches, spec.groups, groups[0])[0],
            rank_range(batches, spec.groups, groups[-1])[-1] + 1,
        )

    def wait(self) -> None:
        """Wait until the reduction is done."""
        self.exposed_seconds = (self.exposed_seconds or 0.0) + self._reduce.finish()

    def full_state(self, kind: str) -> GatheredState:
        """Return an optimizer state of all ranks, to be gathered while it is written."""
        rule, partition = self.spec.optimizer, self.partition
        assert rule
        slices = ((part, rank) for rank in range(partition.ranks) for part in partition.rank_slices(rank))
        owned = ((part, rank) for part, rank in slices if rule.has_state(kind, part.name, part.shape))
        pieces = sorted(owned, key=lambda entry: entry[0].start)
        return GatheredState(self.comm, kind, pieces, self.states[kind].pull())

    def send_state(self, kind: str) -> None:
        """Send this rank's part of a state to rank 0."""
        self.full_state(kind).send_pieces()

    def load_state(self, kind: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Load this rank's slices of an optimizer state."""
        states, offsets = self.states[kind].parts, self.partition.offsets
        for part in self.graphs.shard_slices:
            if part.key in states:
                start = part.start - offsets[part.name]
                states[part.key][...] = (
                    arrays[part.name].reshape(-1)[start : start + states[part.key].size].reshape(part.shape)
                )
        self.states[kind].push()
        for array in arrays.values():
            release_pages(array)

    def starts_sum(self, index: int) -> bool:
        """Return True if this micro-batch starts a sum in vector 0."""
        return self.accumulation.starts_sum(index)

    def output_callbacks(self, graph: StepGraph) -> dict[Tensor, Callable[[], None]]:
        """Return callbacks that mark a bucket as final after its last gradient."""
        plan, callbacks = self.graphs.plan(graph), dict[Tensor, Callable[[], None]]()
        if not graph.grads:
            return callbacks
        node_indices = {node: index for index, node in enumerate(plan.nodes)}
        last: dict[Tensor, list[int]] = {}
        for bucket, segments in enumerate(self.partition.buckets):
            grads = [graph.grads[part.name] for segment in segments for part in segment]
            latest = max(
                grads, key=lambda grad: node_indices[node] if (node := plan.outputs[grad].node) else -1
            )
            last.setdefault(latest, []).append(bucket)
        return {grad: partial(self._mark_final, buckets) for grad, buckets in last.items()}

    def _mark_final(self, buckets: list[int]) -> None:
        assert self.grads
        for bucket in buckets:
            self.grads.pull(
                merge_ranges(cut for segment in self.partition.buckets[bucket] for cut in segment)
            )
            self._reduce.mark_final(bucket)

    def compute_gradients(
        self, batch: Batch, totals: StepTotals, index: int, key: DropoutKey = (0, 0)
    ) -> float:
        """Run a micro-batch; the last one of a step starts the reduction."""
        last = index == self.accumulation.count - 1
        if index == 0:
            self.exposed_seconds = 0.0
        if last:
            self._reduce.start()
        try:
            loss = super().compute_gradients(batch, totals, index, key)
        except BaseException:
            self._reduce.cancel()
            raise
        if not last and (group := self.accumulation.ending_group(index)):
            assert self.grads
            self.grads.pull()
            self._accumulate(group)
        return loss

    def _accumulate(self, group: GroupStep) -> None:
        vectors = self._vectors
        for to, source in group.additions:
            vectors[to] += vectors[source]
        if group.move_to:
            vectors[group.move_to][:] = vectors[0]

    # ---- the step ----------------------------------------------------------

    def update_weights(self, step: int, rate: float) -> float:
        """Update this rank's slices and exchange the weights; return the norm of the whole gradient."""
        assert self.grads
        self.grads.push()
        own_squares = list[float]()
        if self.graphs.shard_slices:  # with whole weights a rank may have none
            norm_program = self._norm_program()
            norm_program.program()
            own_squares = [float(norm_program.program.read(square)) for square in norm_program.graph.outputs]
        norm = math.sqrt(
            math.fsum(
                square
                for rank_squares in self._time_exposed(lambda: self.comm.all_gather(own_squares))
                for square in rank_squares
            )
        )
        clip = self.spec.clip
        factor = min(1.0, clip / (norm + EPSILON)) if clip > 0 and math.isfinite(norm) else 1.0
        if self.graphs.shard_slices:
            update_program = self._shard_update_program()
            update_program.set_schedule(step, rate).program.write(
                update_program.graph.inputs["factor"], np.float32(factor)
            )
            self._last = update_program
            update_program.program()
        if self.comm.size > 1:
            self._time_exposed(lambda: self._all_gather(self.weights.pull().vector))
            self.weights.push()
        return norm

    def total_gradient(self) -> np.ndarray:
        """Return the whole gradient on every rank."""
        self._time_exposed(lambda: self._all_gather(self._vectors[0]))
        return self._vectors[0]

    def _time_exposed(self, communicate: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = communicate()
        self.exposed_seconds = (self.exposed_seconds or 0.0) + time.perf_counter() - start
        return result

    def _all_gather(self, vector: np.ndarray) -> None:
        """Share a vector's segments: afterwards every rank has all of them."""
        partition = self.partition
        if partition.ranks == 1:
            return
        parts = [
            [
                vector[run]
                for bucket in range(len(partition.buckets))
                for run in partition.bucket_ranges(bucket, rank)
            ]
            for rank in range(partition.ranks)
        ]
        self.comm.barrier()
        self.comm.all_to_all([parts[partition.rank]] * partition.ranks, parts)

    def _compile_update(self) -> None:
        if self.graphs.shard_slices:
            self._norm_program()
            self._shard_update_program()

    def _norm_program(self) -> BoundGraph:
        return self._private_program("squares", lambda: self.graphs.norm_graph(self.spec.rank))

    def _shard_update_program(self) -> BoundGraph:
        return self._private_program("own update", lambda: self.graphs.shard_update_graph(self.spec.rank))

    def _private_program(self, kind: str, build: Callable[[], StepGraph]) -> BoundGraph:
        """Return a program with its own arena."""
        if (kind, 0) not in self._programs:
            with phase("planning"):
                graph = build()
            self._programs[kind, 0] = BoundGraph(self.graphs, graph, self.all_memory())
        return self._programs[kind, 0]
