"""The programs of a run over shared memory. Leaves of their graphs are bound by name.

Parameters, gradients and moments are flat vectors with one layout, in the order of the weights.
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
from llamatrain.io.madvise import release_pages
from llamatrain.model import transformer
from llamatrain.model.limits import DEEP
from llamatrain.platform.terminal import log_if_slow
from llamatrain.preference.batch import VARYING, PreferenceTotals, Rewards, told_of
from llamatrain.train.graphs import StepGraph, StepGraphs

Key = tuple[int, int]  # what dropouts of a batch follow from


class FlatParams:
    """One flat vector for all weights, or for one value per weight, as a NumPy array.

    Initialization, checkpoints and minimizers read and write it.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], backend: Backend) -> None:
        sizes = [int(np.prod(shape)) for shape in shapes.values()]
        self.vector = backend.take(4 * sum(sizes)).view(np.float32)
        parts = np.split(self.vector, np.cumsum(sizes)[:-1]) if sizes else []
        self.parts = {
            name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }

    def put(self, pieces: Mapping[str, np.ndarray]) -> None:
        """Copy values for some weights, and release the pages of the mapped file they come from."""
        for name, piece in pieces.items():
            self.parts[name][...] = piece
            release_pages(piece)

    def named(self, kind: str) -> dict[str, np.ndarray]:
        """Return the arrays by name, with a suffix such as ".grad"."""
        return {f"{name}{kind}": part for name, part in self.parts.items()}


class EvalPrograms:
    """Runs evaluation graphs over given arrays. Programs are compiled when they are first needed."""

    def __init__(self, graphs: StepGraphs, arrays: Mapping[str, np.ndarray], arena: int) -> None:
        self.graphs, self.setting, self.arena = graphs, graphs.setting, graphs.setting.backend.take(arena)
        table = self.setting.h.table(self.setting.positions)
        self._arrays = {**arrays, graphs.table.name: table}
        self._bound: dict[tuple[str, int], BoundGraph] = {}
        self._last: BoundGraph | None = None

    def judged(self, batch: Batch) -> tuple[float, int | None]:
        """Return the loss of a batch, a sum over tokens, and the number of correct predictions if counted."""
        length = batch.tokens.shape[1]
        bound = self.judging(length).feed(batch, PreferenceTotals())
        loss, right = self.run(bound), bound.graph.right
        return loss, None if right is None else int(bound.program.read(right))

    def rewards(self, batch: Batch) -> Rewards | None:
        """Return the rewards of the answers in the last batch, or None without preferences."""
        graph = self._last.graph if self._last else None
        if not (self._last and graph and graph.rewards):
            return None
        return Rewards.of(batch, self._last.program.read(graph.rewards))

    def terms(self) -> list[float]:
        """Return the terms that the last evaluated loss is the sum of."""
        assert self._last
        return [float(self._last.program.read(term)) for term in self._last.graph.terms]

    def parts(self) -> list[np.ndarray]:
        """Return what each pair or answer adds to the terms that were evaluated last."""
        assert self._last
        return [self._last.program.read(each) for each in self._last.graph.each]

    def token_losses(self, batch: Batch) -> np.ndarray:
        """Return what each token with a weight adds to the loss that was evaluated last."""
        (losses,), chosen = self.parts(), np.flatnonzero(batch.weights)
        assert self._last
        return losses[: len(chosen)] if "weighed" in self._last.graph.inputs else losses[chosen]

    def judging(self, length: int) -> "BoundGraph":
        """Return the evaluation program for rows of this length."""
        return self.bound("loss", length, lambda: self.graphs.loss(length))

    def bound(self, kind: str, length: int, make: Callable[[], StepGraph]) -> "BoundGraph":
        """Return the program of a kind and length, and build it if it is missing."""
        if (kind, length) not in self._bound:
            with phase("planning"):
                graph = make()
            told = self.told(graph)
            self._bound[kind, length] = BoundGraph(
                self.graphs, graph, self._arrays | self.graphs.states, self.arena, told
            )
        return self._bound[kind, length]

    def told(self, graph: StepGraph) -> dict[Tensor, Callable[[], None]]:
        """Return callbacks to run as soon as an output of the graph is computed."""
        return {}

    def run(self, bound: "BoundGraph") -> float:
        """Run a program and return its first output."""
        self._last = bound
        return bound.run()

    def first_bad(self) -> str:
        """Describe the first tensor with NaN or infinity in the last run.

        The weights are unusable afterwards.
        """
        found = self._last.program.first_not_finite() if self._last else None
        return described(found) if found is not None else "none: it came up in the sum"


class TrainPrograms(EvalPrograms):
    """The programs of training, with the memory of weights, gradients and optimizer states."""

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
        """Compile the programs that these batches need, and return the seconds that took."""
        start, layers = time.perf_counter(), self.setting.h.layers
        with (
            log_if_slow(f"making programs of {layers:,} layers, which takes a while")
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
        """Return an optimizer state of all weights as one vector."""
        return self.vectors[kind].vector

    def serve(self, kind: str) -> None:
        """Send this rank's part of a state to rank 0, which saves it.

        With one rank there is nothing to do.
        """

    def put_back(self, kind: str, pieces: Mapping[str, np.ndarray]) -> None:
        """Load an optimizer state from a checkpoint."""
        self.vectors[kind].put(pieces)

    def share(self, batches: int) -> range:
        """Return the indices of a step's micro-batches that this process runs."""
        return range(batches)

    def settle(self) -> None:
        """Wait until the reduction that runs in parallel to the gradients is done."""

    def overwrites(self, number: int) -> bool:
        """Return True if this micro-batch starts a sum of gradients, instead of adding to one."""
        return number == 0

    def gradients(self, batch: Batch, total: PreferenceTotals, number: int, key: Key = (0, 0)) -> float:
        """Return the batch's share of the step's loss, and store or add its gradients.

        `total` has the sums of weights of the whole step.
        """
        self._newest = self._adding(batch.tokens.shape[1], self.overwrites(number))
        return self.run(self._newest.feed(batch, total, key))

    def summed(self) -> np.ndarray:
        """Return the gradient of the whole step."""
        assert self.grads
        return self.grads.vector

    def update(self, step: int, rate: float) -> float:
        """Update the weights by the stored gradients; return the gradients' norm before clipping."""
        return self.run(self._updating(self._newest).schedule(step, rate))

    def streamed(
        self, batch: Batch, total: PreferenceTotals, step: int, rate: float, key: Key = (0, 0)
    ) -> tuple[float, float]:
        """Run a whole step without memory for gradients; return loss and norm."""
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
    """A graph with its plan and memory, compiled to a program."""

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
        """The number of tokens per row."""
        return self.graph.inputs["tokens"].shape[1]

    def feed(self, batch: Batch, total: PreferenceTotals, key: Key = (0, 0)) -> "BoundGraph":
        """Write the inputs for a batch."""
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
        """Write the optimizer's numbers for a step."""
        assert self.rule
        self.program.write(self.graph.inputs["schedule"], self.rule.schedule(step, rate))
        return self

    def run(self) -> float:
        """Run the program and return its first output, such as the loss."""
        self.program()
        return float(self.program.read(self.graph.first))
