"""The programs of a training run, over memory that they share: a batch's gradients, the optimizer's step, a validation batch.

Every leaf of every graph is bound by its name: weights under their GGUF names, with `.grad`, `.m` and `.v` behind them for
what belongs to each. Parameters, gradients and moments are flat vectors of one layout, in the order of the weights.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from llamatrain.data.rows import Batch
from llamatrain.engine.plan import Plan, plan
from llamatrain.engine.program import Program, allocate, scratch_rule
from llamatrain.graph.precision import round_products
from llamatrain.graph.show import described
from llamatrain.graph.tensor import Tensor, leaves_of
from llamatrain.model import llama
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.optim.adamw import schedule_input
from llamatrain.optim.step import SGD, AdamW, Differentiated, Kept, Optimizer, apply, differentiate, hold, stream

Policy = str | int


@dataclass(frozen=True)
class Setting:
    """What the graphs are made of."""

    h: Hyperparameters
    batch: int
    optimizer: Optimizer | None  # None: L-BFGS, which works on vectors
    kept: bool  # gradients stay in memory of their own, or are used up at once
    clip: float
    precision: str
    flash: bool
    squared: bool
    positions: int  # of the table of rotations
    kernels: str
    threads: int


@dataclass(frozen=True)
class Graph:
    """Outputs to run, with what is written before and where the results are to lie."""

    outputs: list[Tensor]
    inputs: dict[str, Tensor]
    pinned: dict[Tensor, str] = field(default_factory=dict)  # output: the name of its memory
    first: Tensor | None = None  # the loss, or the norm


class Graphs:
    """Builds each graph once. Nothing here takes memory."""

    def __init__(self, setting: Setting, policy: Policy) -> None:
        self.setting, self.policy = setting, policy
        self.weights = llama.parameters(setting.h)
        self.table = llama.rope_state(setting.h, setting.positions)
        self.states: dict[str, np.ndarray] = {}
        self._kept: dict[int, Kept] = {}
        self._trainings: dict[int, llama.Training] = {}

    def _training(self, length: int) -> llama.Training:
        if length not in self._trainings:
            s = self.setting
            made = llama.training(s.h, self.weights, s.batch, length, self.table, flash=s.flash, squared=s.squared)
            self.states |= {tensor.name: array for tensor, array in made.more_states.items()}
            self._trainings[length] = made
        return self._trainings[length]

    def _differentiated(self, length: int) -> Differentiated:
        m, weights = self._training(length), list(self.weights.values())
        return differentiate(m.loss, weights, precision=self.setting.precision, borders=m.borders, remat=self.policy)

    def _held(self, length: int) -> Kept:
        if length not in self._kept:
            self._kept[length] = hold(self._differentiated(length))
        return self._kept[length]

    def gradients(self, length: int, first: bool) -> Graph:
        """A batch's gradients: written to their memory, or added to what is there."""
        kept, inputs = self._held(length), self._training(length).inputs
        if not first:
            return Graph([kept.loss, *kept.more], inputs, first=kept.loss)
        names = [f"{name}.grad" for name in self.weights]
        return Graph([kept.loss, *kept.first], inputs, dict(zip(kept.first, names, strict=True)), kept.loss)

    def update(self, length: int) -> Graph:
        """The step that the kept gradients ask for."""
        assert self.setting.optimizer
        told, norm, outputs = apply(self._held(length), self.setting.optimizer, self.setting.clip)
        return Graph(outputs, {"schedule": told.schedule}, first=norm)

    def streamed(self, length: int) -> Graph:
        """A batch's gradients, each used up at once."""
        assert self.setting.optimizer
        made = self._differentiated(length)
        told, outputs = stream(made, self.setting.optimizer)
        return Graph(outputs, self._training(length).inputs | {"schedule": told.schedule}, first=made.loss)

    def loss(self, length: int) -> Graph:
        m = self._training(length)
        (loss,) = round_products([m.loss]) if self.setting.precision == "bf16" else [m.loss]
        return Graph([loss], m.inputs, first=loss)

    def plan(self, graph: Graph) -> Plan:
        return plan(graph.outputs, pinned=graph.pinned, scratch=scratch_rule(self.setting.kernels, self.setting.threads))

    def all(self, lengths: Iterable[int], accumulating: bool, validating: bool) -> list[Graph]:
        """Every graph that a run will need."""
        lengths = list(lengths)
        made = []
        for length in lengths:
            if self.setting.kept:
                made.append(self.gradients(length, True))
                if accumulating:
                    made.append(self.gradients(length, False))
            else:
                made.append(self.streamed(length))
            if validating:
                made.append(self.loss(length))
        if self.setting.kept and self.setting.optimizer:
            made.append(self.update(lengths[-1]))
        return made


class Flat:
    """One vector for all weights, or for something that each has one of."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = dict(shapes)
        sizes = [int(np.prod(shape)) for shape in shapes.values()]
        self.vector = allocate(4 * sum(sizes)).view(np.float32)
        parts = np.split(self.vector, np.cumsum(sizes)[:-1])
        self.parts = {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}

    def named(self, kind: str) -> dict[str, np.ndarray]:
        return {f"{name}{kind}": part for name, part in self.parts.items()}


class Programs:
    """Runs batches. Weights, gradients and moments lie here; `vectors` has the optimizer's, by kind."""

    def __init__(self, graphs: Graphs, arena: int) -> None:
        self.graphs, self.setting = graphs, graphs.setting
        shapes = self.setting.h.shapes
        self.weights = Flat(shapes)
        self.grads = Flat(shapes) if self.setting.kept else None
        kinds = {AdamW: ("m", "v"), SGD: ("m",)}.get(type(self.setting.optimizer), ())
        self.vectors = {kind: Flat(shapes) for kind in kinds}
        self.arena = allocate(arena)
        self.arrays = self.weights.named("")
        self.arrays[graphs.table.name] = self.setting.h.rope.table(self.setting.positions)
        for kind, flat in self.vectors.items():
            self.arrays |= flat.named(f".{kind}")
        if self.grads:
            self.arrays |= self.grads.named(".grad")
        self._bound: dict[tuple[str, int], Bound] = {}
        self._last: Bound | None = None

    def _program(self, kind: str, length: int, make: Callable[[], Graph]) -> "Bound":
        if (kind, length) not in self._bound:
            self._bound[kind, length] = Bound(make(), self)
        return self._bound[kind, length]

    def gradients(self, batch: Batch, total: float, first: bool) -> float:
        """The batch's share of the step's loss, whose weights are `total` together; its gradients are kept."""
        length = batch.tokens.shape[1]
        kind = "first" if first else "more"
        return self._program(kind, length, lambda: self.graphs.gradients(length, first)).feed(batch, total).run()

    def update(self, step: int, rate: float) -> float:
        """Change the weights by the kept gradients; the gradients' norm before clipping."""
        length = max(length for _, length in self._bound)
        return self._program("update", 0, lambda: self.graphs.update(length)).schedule(step, rate).run()

    def streamed(self, batch: Batch, total: float, step: int, rate: float) -> float:
        """A whole step, without memory for gradients: its loss."""
        length = batch.tokens.shape[1]
        program = self._program("streamed", length, lambda: self.graphs.streamed(length))
        return program.feed(batch, total).schedule(step, rate).run()

    def loss(self, batch: Batch) -> float:
        """Of a batch, a sum over its tokens."""
        length = batch.tokens.shape[1]
        return self._program("loss", length, lambda: self.graphs.loss(length)).feed(batch, 1.0).run()

    def first_bad(self) -> str:
        """Where NaN or infinity came up first in what ran last. Weights are not to be used after it."""
        found = self._last.program.first_not_finite() if self._last else None
        return described(found) if found is not None else "none: it came up in the sum"


class Bound:
    """A graph as a program over the run's memory."""

    def __init__(self, graph: Graph, programs: Programs) -> None:
        self.graph, self.programs = graph, programs
        arrays = programs.arrays | programs.graphs.states
        memory = {leaf: arrays[leaf.name] for leaf in leaves_of(graph.outputs) if leaf.name in arrays}
        memory |= {output: arrays[name] for output, name in graph.pinned.items()}
        setting = programs.setting
        self.program = Program.of(graph.outputs, memory, kernels=setting.kernels, threads=setting.threads, arena=programs.arena)

    def feed(self, batch: Batch, total: float) -> "Bound":
        for name, tensor in self.graph.inputs.items():
            if name == "mask":
                self.program[tensor][...] = llama.mask_of(batch.starts)
            elif name == "weights":
                self.program[tensor][...] = batch.weights.reshape(-1) / np.float32(total)
            elif name != "schedule":
                self.program[tensor][...] = getattr(batch, name).reshape(tensor.shape)
        return self

    def schedule(self, step: int, rate: float) -> "Bound":
        optimizer = self.programs.setting.optimizer
        betas = (optimizer.beta1, optimizer.beta2) if isinstance(optimizer, AdamW) else (0.0, 0.0)
        self.program[self.graph.inputs["schedule"]][...] = schedule_input(step, rate, *betas)
        return self

    def run(self) -> float:
        self.programs._last = self
        self.program()
        assert self.graph.first
        return float(self.program[self.graph.first])
