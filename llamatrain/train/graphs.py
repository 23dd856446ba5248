"""The graphs of a run: gradients of a batch, the optimizer step, the loss of a batch. No memory is allocated.

Leaves are identified by name: weights by their GGUF names, with `.grad`, `.m` and `.v` appended for what
belongs to each.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Concatenate, Literal, ParamSpec

import numpy as np

from llamatrain.engine.backend import Backend, backend_of
from llamatrain.engine.plan import Plan, plan
from llamatrain.graph.ops import mul, sum_sqr
from llamatrain.graph.precision import round_products
from llamatrain.graph.tensor import I32, Tensor, parameter, placeholder, state
from llamatrain.model import transformer
from llamatrain.model.distill import Teacher
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.lora import DropoutDelta, Weights
from llamatrain.optim.optimizer import ElementwiseRule, Optimizer
from llamatrain.optim.update_graph import (
    HeldGradients,
    LossAndGradients,
    apply,
    clipped,
    differentiate,
    hold,
    row_of,
    stream,
)
from llamatrain.preference.loss import Objective, comparing
from llamatrain.train.parallel.partition import ParamSlice, Partition

P = ParamSpec("P")
Policy = str | int
# Where gradients are: in a vector of their own, to be added up or for a minimizer; in the arena, until the step has clipped and
# used them; or streamed, each used up at once.
Gradients = Literal["flat", "arena", "streamed"]


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """The model, sizes, precision and optimizer that the graphs of a run are built from."""

    h: Hyperparameters
    weights: Weights
    trained: Mapping[str, Tensor]  # parameters by their names, in the order of flat vectors
    batch: int
    positions: int  # of the table of rotations
    precision: str
    threads: int
    kernels: str = "cpu"
    flash: bool = True
    squared: bool = False
    optimizer: Optimizer | None = None  # None: no training
    gradients: Gradients = "flat"
    clip: float = 0.0
    drop_base: bool = False  # a base's pages are let go after each reading
    sparse: bool = False  # many tokens have no weight
    objective: Objective | None = None  # of preferences
    reference: Weights | None = None  # what it compares with
    teacher: Teacher | None = None
    plus: float = 1.0  # the rate of adapters' second factors, in rates of all else (LoRA+, Hayou et al. 2024)
    groups: int = 1  # of a step's micro-batches, which ranks divide among themselves
    ranks: int = 1
    rank: int = 0
    half_wire: bool = False  # between ranks gradients are bf16

    @property
    def rule(self) -> ElementwiseRule | None:
        """The optimizer, if its step is a graph as well."""
        return self.optimizer if isinstance(self.optimizer, ElementwiseRule) else None

    @property
    def whole(self) -> bool:
        """True if sparse gradients (few rows) are stored densely, like those of all other weights."""
        return self.gradients == "flat" or not (self.rule and self.rule.brief)

    @cached_property
    def backend(self) -> Backend:
        """The backend that the graphs run on."""
        return backend_of(self.kernels, self.threads, self.drop_base)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the trained weights, by name."""
        return {name: tensor.shape for name, tensor in self.trained.items()}


@dataclass(frozen=True, eq=False)
class StepGraph:
    """A graph: the outputs to run, its inputs, and the memory where results must go."""

    first: Tensor  # of the outputs: the loss, or that of a step's own graph: the norm
    outputs: list[Tensor]
    inputs: dict[str, Tensor]
    named: dict[Tensor, str] = field(
        default_factory=dict
    )  # outputs that others read: the names of their memory
    norm: Tensor | None = None  # beside a loss
    right: Tensor | None = None  # likewise
    rewards: Tensor | None = None  # of answers that are compared
    grads: dict[str, Tensor] = field(default_factory=dict)  # outputs, by weights
    terms: tuple[Tensor, ...] = ()  # of a loss of preferences, where it judges
    each: tuple[Tensor, ...] = ()  # the parts of a loss, or of those terms, where it judges


def only(found: Sequence[Tensor]) -> Tensor | None:
    """Return the only element, or None if there is none."""
    return found[0] if found else None


def dropping(weights: Weights) -> bool:
    """Return True if any adapter uses dropout."""
    return any(delta.dropout for deltas in weights.deltas.values() for delta in deltas)


Make = Callable[Concatenate["StepGraphs", P], StepGraph]


def once(make: Make[P]) -> Make[P]:
    """Cache the graph that a method builds, by the method's name and arguments."""

    def made(graphs: "StepGraphs", /, *of: P.args, **more: P.kwargs) -> StepGraph:
        """Return the cached graph, or build it."""
        key = make.__name__, *of, *more.values()
        if key not in graphs.made:
            graphs.made[key] = make(graphs, *of, **more)
        return graphs.made[key]

    return made


class StepGraphs:
    """Builds each graph of a run once, and plans its memory once."""

    def __init__(self, setting: StepSpec, policy: Policy = "none") -> None:
        self.setting, self.policy = setting, policy
        self.table = transformer.rope_state(setting.h, setting.positions)
        self.states: dict[str, np.ndarray] = {}
        self._kept: dict[int, HeldGradients] = {}
        self.made: dict[tuple[object, ...], StepGraph] = {}
        self._plans: dict[StepGraph, Plan] = {}
        self._trainings: dict[tuple[int, bool], transformer.Training] = {}
        self.key = placeholder("dropout", (2,), I32) if dropping(setting.weights) else None
        self.rates: dict[Tensor, Tensor] = {}
        if setting.plus != 1 and setting.rule:
            row = np.ones_like(setting.rule.schedule(1, 0.0))
            row[0] = setting.plus
            faster = state("lora_plus", row.shape)
            self.states[faster.name] = row
            self.rates = {
                tensor: faster for name, tensor in setting.trained.items() if name.endswith(".lora_b")
            }

    def _training(self, length: int, dropping: bool = True) -> transformer.Training:
        if (length, dropping) not in self._trainings:
            key = self.key if dropping else None
            made = self._made(
                replace(self.setting.weights, dropping=DropoutDelta(key) if key else None), length
            )
            if key:
                made.inputs["dropout"] = key
            self.states |= {tensor.name: array for tensor, array in made.more_states.items()}
            self._trainings[length, dropping] = made
        return self._trainings[length, dropping]

    def _made(self, weights: Weights, length: int) -> transformer.Training:
        s = self.setting
        if s.objective:
            against, of = s.reference or weights, {"batch": s.batch, "length": length}
            return comparing(
                s.objective, s.h, weights, against, table=self.table, sparse=s.sparse, flash=s.flash, **of
            )
        how = {"sparse": s.sparse, "flash": s.flash, "squared": s.squared}
        return transformer.training(s.h, weights, s.batch, length, self.table, teacher=s.teacher, **how)

    def _differentiated(self, length: int) -> LossAndGradients:
        m, trained = self._training(length), list(self.setting.trained.values())
        beside = [m.rewards] if m.rewards else []
        precision = self.setting.precision
        return differentiate(
            m.loss, trained, precision=precision, borders=m.borders, remat=self.policy, beside=beside
        )

    def _held(self, length: int) -> HeldGradients:
        if length not in self._kept:
            self._kept[length] = hold(self._differentiated(length), whole=self.setting.whole)
        return self._kept[length]

    @once
    def gradients(self, length: int, first: bool) -> StepGraph:
        """Return the graph of a batch's gradients, which overwrites (`first`) or adds to their memory."""
        kept, inputs = self._held(length), self._training(length).inputs
        made, named = kept.more, dict[Tensor, str]()
        if first:
            made, named = (
                kept.first,
                {output: leaf.name for output, leaf in zip(kept.first, kept.memory, strict=True)},
            )
        outputs = [kept.loss, *made, *kept.beside]
        grads = (
            {weight.name: grad for weight, grad in zip(kept.blocks, made, strict=False)}
            if self.setting.whole
            else {}
        )
        return StepGraph(
            first=kept.loss,
            outputs=outputs,
            inputs=inputs,
            named=named,
            rewards=only(kept.beside),
            grads=grads,
        )

    @once
    def update(self, length: int) -> StepGraph:
        """Return the graph of the optimizer step from the stored gradients."""
        assert self.setting.rule
        told, norm, outputs = apply(self._held(length), self.setting.rule, self.setting.clip, self.rates)
        return StepGraph(norm, outputs, {"schedule": told.schedule})

    # ---- of a step that is divided ------------------------------------------

    @cached_property
    def division(self) -> Partition:
        """The partition of the gradient; buckets are in the order in which gradients become final."""
        s, graph = self.setting, self.longest
        nodes = {node: place for place, node in enumerate(self.plan(graph).nodes)}
        places = {
            name: nodes[node]
            for name, grad in graph.grads.items()
            if (node := self.plan(graph).outputs[grad].node)
        }
        whole = s.rule is not None and not s.rule.apart
        order = sorted(s.trained, key=lambda name: places[name])
        return Partition(
            shapes=s.shapes, order=order, groups=s.groups, ranks=s.ranks, rank=s.rank, whole=whole
        )

    @property
    def cuts(self) -> list[ParamSlice]:
        """The slices of the weights that this process updates: all, unless a step is sharded and uses a rule."""
        if self.setting.groups > 1 and self.setting.rule:
            return self.division.cuts_of(self.setting.rank)
        begins = accumulate((prod(shape) for shape in self.setting.shapes.values()), initial=0)
        return [
            ParamSlice(name, at, at + prod(shape), shape, name)
            for at, (name, shape) in zip(begins, self.setting.shapes.items(), strict=False)
        ]

    @property
    def held(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """The shapes of the optimizer states, by kind and by weight."""
        rule = self.setting.optimizer
        kinds = rule.states if rule else ()
        cuts = self.cuts if rule else []
        return {
            kind: {cut.key: cut.shape for cut in cuts if rule and rule.holds(kind, cut.name, cut.shape)}
            for kind in kinds
        }

    @once
    def squares(self, rank: int) -> StepGraph:
        """Return the graph of the sums of squares of a rank's gradient, one per slice."""
        squares = [sum_sqr(state(f"{cut.key}.grad", cut.shape)) for cut in self.division.cuts_of(rank)]
        return StepGraph(squares[0], squares, {})

    @once
    def own_update(self, rank: int) -> StepGraph:
        """Return the graph that updates a rank's slices, given the clipping factor."""
        rule = self.setting.rule
        assert rule
        schedule, factor = row_of(rule), placeholder("factor", ())
        faster, steps = {weight.name: row for weight, row in self.rates.items()}, list[Tensor]()
        for cut in self.division.cuts_of(rank):
            weight, grad = parameter(cut.key, cut.shape), state(f"{cut.key}.grad", cut.shape)
            row = mul(schedule, faster[cut.name]) if cut.name in faster else schedule
            steps += rule.step(weight, grad, row, factor)
        return StepGraph(steps[0], steps, {"schedule": schedule, "factor": factor})

    @once
    def streamed(self, length: int) -> StepGraph:
        """Return the graph of a whole step in which each gradient is used and freed at once."""
        assert self.setting.rule
        made = self._differentiated(length)
        told, outputs = stream(made, self.setting.rule, self.rates)
        _, norm = clipped(made.used_by(self.setting.rule).values(), 0.0)
        inputs = self._training(length).inputs | {"schedule": told.schedule}
        return StepGraph(
            made.loss, [*outputs, norm, *made.beside], inputs, norm=norm, rewards=only(made.beside)
        )

    @once
    def loss(self, length: int) -> StepGraph:
        """Return the graph of a batch's loss without gradients, for validation."""
        m = self._training(length, dropping=self.key is None)
        outputs = [*m.terms, *m.each, m.rewards] if m.rewards else [*(m.judged or (m.loss,))]
        if self.setting.precision == "bf16":
            outputs = round_products(outputs)
        if m.rewards:
            terms, each = outputs[: len(m.terms)], outputs[len(m.terms) : -1]
            return StepGraph(
                outputs[0], outputs, m.inputs, rewards=outputs[-1], terms=tuple(terms), each=tuple(each)
            )
        right = outputs[1] if m.judged else None
        return StepGraph(
            first=outputs[0], outputs=outputs, inputs=m.inputs, right=right, each=tuple(outputs[2:])
        )

    def plan(self, graph: StepGraph) -> Plan:
        """Return the memory plan of a graph.

        Accumulated gradients have memory of their own; otherwise they stay in the arena.
        """
        if graph not in self._plans:
            backend, pinned = self.setting.backend, graph.named if self.setting.gradients == "flat" else ()
            self._plans[graph] = plan(
                graph.outputs, pinned=pinned, scratch=backend.scratch, resident=backend.resident
            )
        return self._plans[graph]

    @property
    def longest(self) -> StepGraph:
        """The graph with the longest rows that was built: gradients, or the whole step if they are streamed."""
        length = max(length for length, _ in self._trainings)
        return self.streamed(length) if self.setting.gradients == "streamed" else self.gradients(length, True)

    def all(
        self, lengths: Iterable[int], accumulating: bool, validating: bool
    ) -> tuple[list[StepGraph], list[StepGraph]]:
        """Build every graph that a run needs: those that share an arena, and the update graphs with their
        own.
        """
        lengths = list(lengths)
        made, updates = list[StepGraph](), list[StepGraph]()
        for length in lengths:
            if self.setting.gradients != "streamed":
                made.append(self.gradients(length, True))
                if accumulating:
                    made.append(self.gradients(length, False))
            else:
                made.append(self.streamed(length))
            if validating:
                made.append(self.loss(length))
            once = self.setting.gradients == "flat" and not updates
            if self.setting.rule and self.setting.groups == 1 and (once or self.setting.gradients == "arena"):
                updates.append(self.update(length))
        if self.setting.rule and self.setting.groups > 1:
            updates += [
                self.squares(0),
                self.own_update(0),
            ]  # what is planned must not depend on who plans it
        return made, updates
