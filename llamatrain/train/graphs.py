"""The graphs of a run: a batch's gradients, the optimizer's step, a batch's loss. Nothing here takes memory.

Leaves are known by their names: weights under their GGUF names, with `.grad`, `.m` and `.v` behind them for what belongs to
each.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from llamatrain.engine.plan import Plan, plan
from llamatrain.engine.program import scratch_rule
from llamatrain.graph.precision import round_products
from llamatrain.graph.tensor import Tensor
from llamatrain.model import llama
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.optim.step import Differentiated, Kept, Optimizer, apply, differentiate, hold, stream

Policy = str | int


@dataclass(frozen=True)
class Setting:
    """What the graphs are made of."""

    h: Hyperparameters
    batch: int
    positions: int  # of the table of rotations
    precision: str
    threads: int
    kernels: str = "cpu"
    flash: bool = True
    squared: bool = False
    optimizer: Optimizer | None = None  # None: L-BFGS, which works on vectors, or no training at all
    kept: bool = True  # gradients stay in memory of their own, or are used up at once
    clip: float = 0.0


@dataclass(frozen=True)
class Graph:
    """Outputs to run, with what is written before and where the results are to lie."""

    first: Tensor  # of the outputs: the loss, or the norm
    outputs: list[Tensor]
    inputs: dict[str, Tensor]
    pinned: dict[Tensor, str] = field(default_factory=dict)  # output: the name of its memory


class Graphs:
    """Builds each once."""

    def __init__(self, setting: Setting, policy: Policy = "none") -> None:
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
            return Graph(kept.loss, [kept.loss, *kept.more], inputs)
        names = [f"{name}.grad" for name in self.weights]
        return Graph(kept.loss, [kept.loss, *kept.first], inputs, dict(zip(kept.first, names, strict=True)))

    def update(self, length: int) -> Graph:
        """The step that the kept gradients ask for."""
        assert self.setting.optimizer
        told, norm, outputs = apply(self._held(length), self.setting.optimizer, self.setting.clip)
        return Graph(norm, outputs, {"schedule": told.schedule})

    def streamed(self, length: int) -> Graph:
        """A batch's gradients, each used up at once."""
        assert self.setting.optimizer
        made = self._differentiated(length)
        told, outputs = stream(made, self.setting.optimizer)
        return Graph(made.loss, outputs, self._training(length).inputs | {"schedule": told.schedule})

    def loss(self, length: int) -> Graph:
        m = self._training(length)
        (loss,) = round_products([m.loss]) if self.setting.precision == "bf16" else [m.loss]
        return Graph(loss, [loss], m.inputs)

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
