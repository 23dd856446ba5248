"""The programs of a run, over memory that they share: leaves of their graphs are bound by name.

Parameters, gradients and moments are flat vectors of one layout, in the order of the weights.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from llamatrain.data.batches import Batch
from llamatrain.engine.backend import Backend, Memory
from llamatrain.engine.profiler import phase
from llamatrain.engine.program import Program
from llamatrain.graph.printing import described
from llamatrain.graph.tensor import Tensor, leaves_of
from llamatrain.io.madvise import release
from llamatrain.model import transformer
from llamatrain.model.limits import DEEP
from llamatrain.platform.terminal import told_if_long
from llamatrain.preference.batch import VARYING, PreferenceTotals, Rewards, told_of
from llamatrain.train.graphs import StepGraph, StepGraphs

Key = tuple[int, int]  # what dropouts of a batch follow from


class FlatParams:
    """One vector for all weights, or for something that each has one of, which Python sees, too: first values, checkpoints and
    minimizers go over it."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], backend: Backend) -> None:
        sizes = [int(np.prod(shape)) for shape in shapes.values()]
        self.vector = backend.take(4 * sum(sizes)).view(np.float32)
        parts = np.split(self.vector, np.cumsum(sizes)[:-1]) if sizes else []
        self.parts = {
            name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }

    def put(self, pieces: Mapping[str, np.ndarray]) -> None:
        """Values for some; the pages of a mapped file are let go."""
        for name, piece in pieces.items():
            self.parts[name][...] = piece
            release(piece)

    def named(self, kind: str) -> dict[str, np.ndarray]:
        return {f"{name}{kind}": part for name, part in self.parts.items()}


class EvalPrograms:
    """Runs graphs over some arrays; programs are made when they are first needed."""

    def __init__(self, graphs: StepGraphs, arrays: Mapping[str, np.ndarray], arena: int) -> None:
        self.graphs, self.setting, self.arena = graphs, graphs.setting, graphs.setting.backend.take(arena)
        table = self.setting.h.table(self.setting.positions)
        self._arrays = {**arrays, graphs.table.name: table}
        self._bound: dict[tuple[str, int], BoundGraph] = {}
        self._last: BoundGraph | None = None

    def judged(self, batch: Batch) -> tuple[float, int | None]:
        """A batch's loss, a sum over its tokens; and how many of those were foretold, where that is asked for."""
        length = batch.tokens.shape[1]
        bound = self.judging(length).feed(batch, PreferenceTotals())
        loss, right = self.run(bound), bound.graph.right
        return loss, None if right is None else int(bound.program.read(right))

    def rewards(self, batch: Batch) -> Rewards | None:
        """Of the answers in the batch that ran last."""
        graph = self._last.graph if self._last else None
        if not (self._last and graph and graph.rewards):
            return None
        return Rewards.of(batch, self._last.program.read(graph.rewards))

    def terms(self) -> list[float]:
        """What the loss that was judged last adds up."""
        assert self._last
        return [float(self._last.program.read(term)) for term in self._last.graph.terms]

    def parts(self) -> list[np.ndarray]:
        """Return what each pair or answer brings to the terms that were judged last."""
        assert self._last
        return [self._last.program.read(each) for each in self._last.graph.each]

    def token_losses(self, batch: Batch) -> np.ndarray:
        """Return what each token that has a weight brings to the loss that was judged last."""
        (losses,), chosen = self.parts(), np.flatnonzero(batch.weights)
        assert self._last
        return losses[: len(chosen)] if "weighed" in self._last.graph.inputs else losses[chosen]

    def judging(self, length: int) -> "BoundGraph":
        return self.bound("loss", length, lambda: self.graphs.loss(length))

    def bound(self, kind: str, length: int, make: Callable[[], StepGraph]) -> "BoundGraph":
        if (kind, length) not in self._bound:
            with phase("planning"):
                graph = make()
            told = self.told(graph)
            self._bound[kind, length] = BoundGraph(
                self.graphs, graph, self._arrays | self.graphs.states, self.arena, told
            )
        return self._bound[kind, length]

    def told(self, graph: StepGraph) -> dict[Tensor, Callable[[], None]]:
        """Who waits for outputs of it."""
        return {}

    def run(self, bound: "BoundGraph") -> float:
        self._last = bound
        return bound.run()

    def first_bad(self) -> str:
        """Where NaN or infinity came up first in what ran last. Weights are not to be used after it."""
        found = self._last.program.first_not_finite() if self._last else None
        return described(found) if found is not None else "none: it came up in the sum"


class TrainPrograms(EvalPrograms):
    """Those of a training: what is trained lies here, with gradients and moments; `vectors` has the optimizer's, by kind."""

    exposed: float | None = None  # seconds of this step in which other ranks were waited for

    def __init__(
        self, graphs: StepGraphs, arena: int, frozen: Mapping[str, np.ndarray] | None = None
    ) -> None:
        setting, shapes, backend = graphs.setting, graphs.setting.shapes, graphs.setting.backend
        self.weights = FlatParams(shapes, backend)
        self.grads = FlatParams(shapes, backend) if setting.gradients == "flat" else None
        self.vectors = {kind: FlatParams(held, backend) for kind, held in graphs.held.items()}
        arrays = {**(frozen or {}), **self.weights.named("")}
        for kind, flat in self.vectors.items():
            arrays |= flat.named(f".{kind}")
        if self.grads:
            arrays |= self.grads.named(".grad")
        super().__init__(graphs, arrays, arena)

    def prepare(self, batches: Sequence[Batch]) -> float:
        """Make the programs that these will need, where that was not done; the seconds that it took."""
        start, layers = time.perf_counter(), self.setting.h.layers
        with (
            told_if_long(f"making programs of {layers:,} layers, which takes a while")
            if layers > DEEP
            else nullcontext()
        ):
            for number, batch in enumerate(batches):
                length = batch.tokens.shape[1]
                if self.setting.gradients == "streamed":
                    self._streaming(length)
                else:
                    self._newest = self._adding(length, self.overwrites(number))
            if self.setting.gradients != "streamed" and self.setting.rule:
                self._updates()
        for bound in list(self._bound.values()):  # what is foreseen comes to them
            bound.program.ready()
        return time.perf_counter() - start

    def whole_of(self, kind: str) -> Any:
        """A state of the optimizer's, of all weights."""
        return self.vectors[kind].vector

    def serve(self, kind: str) -> None:
        """The own part of it, to the rank that keeps it."""

    def put_back(self, kind: str, pieces: Mapping[str, np.ndarray]) -> None:
        """The same, from where it was kept."""
        self.vectors[kind].put(pieces)

    def share(self, batches: int) -> range:
        """Which of a step's micro-batches are this process's."""
        return range(batches)

    def settle(self) -> None:
        """Wait until what was begun beside the gradients is done."""

    def overwrites(self, number: int) -> bool:
        """Whether this one of a step's batches begins a sum, or is added to one."""
        return number == 0

    def gradients(self, batch: Batch, total: PreferenceTotals, number: int, key: Key = (0, 0)) -> float:
        """The batch's share of the step's loss, whose weights are `total` together; its gradients are kept."""
        self._newest = self._adding(batch.tokens.shape[1], self.overwrites(number))
        return self.run(self._newest.feed(batch, total, key))

    def summed(self) -> np.ndarray:
        """The gradient of the whole step."""
        assert self.grads
        return self.grads.vector

    def update(self, step: int, rate: float) -> float:
        """Change the weights by the kept gradients; the gradients' norm before clipping."""
        return self.run(self._updating(self._newest).schedule(step, rate))

    def streamed(
        self, batch: Batch, total: PreferenceTotals, step: int, rate: float, key: Key = (0, 0)
    ) -> tuple[float, float]:
        """A whole step, without memory for gradients: loss and norm."""
        bound = self._streaming(batch.tokens.shape[1])
        loss = self.run(bound.feed(batch, total, key).schedule(step, rate))
        assert bound.graph.norm
        return loss, float(bound.program.read(bound.graph.norm))

    # ---- programs, made once -----------------------------------------------

    def _adding(self, length: int, first: bool) -> "BoundGraph":
        return self.bound("first" if first else "more", length, lambda: self.graphs.gradients(length, first))

    def _streaming(self, length: int) -> "BoundGraph":
        return self.bound("streamed", length, lambda: self.graphs.streamed(length))

    def _updates(self) -> None:
        self._updating(self._newest)

    def _updating(self, newest: "BoundGraph") -> "BoundGraph":
        # gradients that lie in the arena are read where each length's program left them; the step's own arena is another one
        arena = self.setting.gradients == "arena"
        key = "update", newest.length if arena else 0
        if key not in self._bound:
            there = (
                {name: newest.program.memory_of(grad) for grad, name in newest.graph.named.items()}
                if arena
                else {}
            )
            arrays = there | self._arrays | self.graphs.states
            with phase("planning"):
                graph = self.graphs.update(newest.length)
            self._bound[key] = BoundGraph(self.graphs, graph, arrays)
        return self._bound[key]


class BoundGraph:
    """A graph as a program."""

    def __init__(
        self,
        graphs: StepGraphs,
        graph: StepGraph,
        arrays: Mapping[str, Memory],
        arena: Memory | None = None,
        told: Mapping[Tensor, Callable[[], None]] | None = None,
    ) -> None:
        self.graph, self.rule, self.objective = graph, graphs.setting.rule, graphs.setting.objective
        with phase("planning"):
            plan = graphs.plan(graph)
        memory = {leaf: arrays[leaf.name] for leaf in leaves_of(graph.outputs) if leaf.name in arrays}
        memory |= {
            output: arrays[name]
            for output, name in graph.named.items()
            if plan.outputs[output] in plan.pinned
        }
        self.program = Program(plan, memory, graphs.setting.backend, arena=arena, told=told)

    @property
    def length(self) -> int:
        return self.graph.inputs["tokens"].shape[1]

    def feed(self, batch: Batch, total: PreferenceTotals, key: Key = (0, 0)) -> "BoundGraph":
        told = told_of(batch, self.objective, total, "weighed" in self.graph.inputs) if self.objective else {}
        chosen = (
            np.flatnonzero(batch.weights) if "weighed" in self.graph.inputs else np.arange(batch.weights.size)
        )
        self.program.cut(max(len(told.get(name, chosen)) for name in (*VARYING, "")))
        first = np.s_[: len(chosen)]
        for name, tensor in self.graph.inputs.items():
            if name.endswith("mask"):
                other = batch.compared.others if batch.compared and name != "mask" else None
                for queries, mask in transformer.masks_of((other or batch).starts):
                    self.program.write(tensor, mask, np.s_[:, queries])
            elif name in told:
                self.program.write(tensor, 0)
                self.program.write(tensor, told[name], np.s_[: len(told[name])])
            elif name == "weighed":
                self.program.write(tensor, chosen, first)
            elif name == "targets":
                self.program.write(tensor, batch.targets.reshape(-1)[chosen], first)
            elif name == "weights":
                self.program.write(tensor, 0.0)
                self.program.write(
                    tensor, batch.weights.reshape(-1)[chosen] / np.float32(total.weight), first
                )
            elif name == "dropout":
                self.program.write(tensor, key)
            elif name != "schedule":
                self.program.write(tensor, getattr(batch, name).reshape(tensor.shape))
        return self

    def schedule(self, step: int, rate: float) -> "BoundGraph":
        assert self.rule
        self.program.write(self.graph.inputs["schedule"], self.rule.schedule(step, rate))
        return self

    def run(self) -> float:
        self.program()
        return float(self.program.read(self.graph.first))
