"""The programs of a step that is sharded into groups and among ranks."""

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import numpy as np

from llamatrain.data.batches import Batch
from llamatrain.distributed.comm import Comm
from llamatrain.engine.profiler import phase
from llamatrain.graph.tensor import Tensor
from llamatrain.io.madvise import release_pages
from llamatrain.preference.batch import PreferenceTotals
from llamatrain.train.graphs import StepGraph, StepGraphs
from llamatrain.train.parallel.accumulate import GroupStep, turns_of
from llamatrain.train.parallel.gather import GatheredState
from llamatrain.train.parallel.partition import share
from llamatrain.train.parallel.reduce import TreeReduce
from llamatrain.train.programs import BoundGraph, Key, TrainPrograms

T = TypeVar("T")
SMALL = 1e-6  # beside a norm that is divided by, as in `clip_factor`


class ShardedPrograms(TrainPrograms):
    """Programs whose gradients are summed over groups and ranks.

    Each rank holds the optimizer states of its own segments, updates them, and sends the updated weights to
    all others.
    """

    def __init__(
        self,
        graphs: StepGraphs,
        arena: int,
        frozen: Mapping[str, np.ndarray] | None = None,
        *,
        world: Comm,
        batches: int,
    ) -> None:
        """Allocate the vectors of the accumulation plan for `batches` micro-batches per step."""
        super().__init__(graphs, arena, frozen)
        setting, division = graphs.setting, graphs.division
        assert self.grads
        self.world, self.division = world, division
        self.turns = turns_of(share(setting.groups, setting.ranks, setting.rank), setting.groups, batches)
        size = self.grads.vector.nbytes
        more = [setting.backend.take(size).view(np.float32) for _ in range(1, self.turns.vectors)]
        self._sums = [self.grads.vector, *more]
        self._exchange = TreeReduce(world, division, self.turns, self._sums, setting.half_wire)
        self.exposed = 0.0
        for cut in graphs.cuts if setting.rule else ():
            place = np.s_[cut.start : cut.stop]
            self._arrays[cut.key] = self.weights.vector[place].reshape(cut.shape)
            self._arrays[f"{cut.key}.grad"] = self.grads.vector[place].reshape(cut.shape)

    def share(self, batches: int) -> range:
        """Return the indices of a step's micro-batches that this rank runs."""
        setting = self.setting
        groups = share(setting.groups, setting.ranks, setting.rank)
        return range(
            share(batches, setting.groups, groups[0])[0], share(batches, setting.groups, groups[-1])[-1] + 1
        )

    def settle(self) -> None:
        """Wait until the reduction is done."""
        self.exposed = (self.exposed or 0.0) + self._exchange.finish()

    def whole_of(self, kind: str) -> GatheredState:
        """Return an optimizer state of all ranks, to be gathered while it is written."""
        rule, division = self.setting.optimizer, self.division
        assert rule
        cuts = ((cut, rank) for rank in range(division.ranks) for cut in division.cuts_of(rank))
        held = ((cut, rank) for cut, rank in cuts if rule.holds(kind, cut.name, cut.shape))
        return GatheredState(
            self.world, kind, sorted(held, key=lambda each: each[0].start), self.vectors[kind]
        )

    def serve(self, kind: str) -> None:
        """Send this rank's part of a state to rank 0."""
        self.whole_of(kind).serve()

    def put_back(self, kind: str, pieces: Mapping[str, np.ndarray]) -> None:
        """Load this rank's slices of an optimizer state."""
        held, begins = self.vectors[kind].parts, self.division.begins
        for cut in self.graphs.cuts:
            if cut.key in held:
                start = cut.start - begins[cut.name]
                held[cut.key][...] = (
                    pieces[cut.name].reshape(-1)[start : start + held[cut.key].size].reshape(cut.shape)
                )
        for piece in pieces.values():
            release_pages(piece)

    def overwrites(self, number: int) -> bool:
        """Return True if this micro-batch starts a sum in vector 0."""
        return self.turns.overwrites(number)

    def told(self, graph: StepGraph) -> dict[Tensor, Callable[[], None]]:
        """Return callbacks that mark a bucket as final after its last gradient."""
        plan, found = self.graphs.plan(graph), dict[Tensor, Callable[[], None]]()
        if not graph.grads:
            return found
        places = {node: place for place, node in enumerate(plan.nodes)}
        last: dict[Tensor, list[int]] = {}
        for number, segments in enumerate(self.division.buckets):
            grads = [graph.grads[cut.name] for segment in segments for cut in segment]
            latest = max(grads, key=lambda grad: places[node] if (node := plan.outputs[grad].node) else -1)
            last.setdefault(latest, []).append(number)
        return {grad: partial(self._final, numbers) for grad, numbers in last.items()}

    def _final(self, buckets: list[int]) -> None:
        for number in buckets:
            self._exchange.ready(number)

    def gradients(self, batch: Batch, total: PreferenceTotals, number: int, key: Key = (0, 0)) -> float:
        """Run a micro-batch; the last one of a step starts the reduction."""
        last = number == self.turns.count - 1
        if number == 0:
            self.exposed = 0.0
        if last:
            self._exchange.begin()
        try:
            loss = super().gradients(batch, total, number, key)
        except BaseException:
            self._exchange.give_up()
            raise
        if not last and (turn := self.turns.after(number)):
            self._move(turn)
        return loss

    def _move(self, turn: GroupStep) -> None:
        sums = self._sums
        for to, what in turn.added:
            sums[to] += sums[what]
        if turn.moved:
            sums[turn.moved][:] = sums[0]

    # ---- the step ----------------------------------------------------------

    def update(self, step: int, rate: float) -> float:
        """Update this rank's slices and exchange the weights; return the norm of the whole gradient."""
        mine = list[float]()
        if self.graphs.cuts:  # where weights stay whole, a rank may have none
            squares = self._squares()
            squares.program()
            mine = [float(squares.program.read(each)) for each in squares.graph.outputs]
        norm = math.sqrt(
            math.fsum(each for one in self._waiting(lambda: self.world.gathered(mine)) for each in one)
        )
        clip = self.setting.clip
        factor = min(1.0, clip / (norm + SMALL)) if clip > 0 and math.isfinite(norm) else 1.0
        if self.graphs.cuts:
            stepping = self._stepping()
            stepping.schedule(step, rate).program.write(stepping.graph.inputs["factor"], np.float32(factor))
            self._last = stepping
            stepping.program()
        self._waiting(lambda: self._spread(self.weights.vector))
        return norm

    def summed(self) -> np.ndarray:
        """Return the whole gradient on every rank."""
        self._waiting(lambda: self._spread(self._sums[0]))
        return self._sums[0]

    def _waiting(self, for_what: Callable[[], T]) -> T:
        start = time.perf_counter()
        found = for_what()
        self.exposed = (self.exposed or 0.0) + time.perf_counter() - start
        return found

    def _spread(self, vector: np.ndarray) -> None:
        """Share a vector's segments: afterwards every rank has all of them."""
        division = self.division
        if division.ranks == 1:
            return
        parts = [
            [vector[run] for number in range(len(division.buckets)) for run in division.runs(number, rank)]
            for rank in range(division.ranks)
        ]
        self.world.met()
        self.world.swap([parts[division.rank]] * division.ranks, parts)

    def _updates(self) -> None:
        if self.graphs.cuts:
            self._squares()
            self._stepping()

    def _squares(self) -> BoundGraph:
        return self._own("squares", lambda: self.graphs.squares(self.setting.rank))

    def _stepping(self) -> BoundGraph:
        return self._own("own update", lambda: self.graphs.own_update(self.setting.rank))

    def _own(self, kind: str, make: Callable[[], StepGraph]) -> BoundGraph:
        """Return a program with its own arena."""
        if (kind, 0) not in self._bound:
            with phase("planning"):
                graph = make()
            self._bound[kind, 0] = BoundGraph(self.graphs, graph, self._arrays | self.graphs.states)
        return self._bound[kind, 0]
