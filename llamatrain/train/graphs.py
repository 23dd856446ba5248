"""The graphs of a run: gradients of a batch, the optimizer step, the loss of a batch. No memory is allocated.

Leaves are identified by name: weights by their GGUF names, with `.grad`, `.m` and `.v` appended for what
belongs to each.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Concatenate, Literal, ParamSpec, TypedDict

import numpy as np

from llamatrain.contrastive.forward import build_embeddings
from llamatrain.contrastive.loss import build_comparison
from llamatrain.contrastive.settings import Contrastive
from llamatrain.engine.device import Device, create_device
from llamatrain.engine.plan import Plan, plan
from llamatrain.graph.int8 import Int8Copy, Int8Weights, use_int8_products
from llamatrain.graph.ops import mul, sum_sqr
from llamatrain.graph.precision import round_products
from llamatrain.graph.remat_policy import Policy
from llamatrain.graph.rewrite import read_stored
from llamatrain.graph.tensor import I32, Tensor, collect_leaves, parameter, placeholder, state
from llamatrain.grpo.loss import grpo_loss
from llamatrain.grpo.settings import Grpo
from llamatrain.model import transformer
from llamatrain.model.distill import Teacher
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.lora import DropoutDelta, Weights
from llamatrain.optim.optimizer import ElementwiseRule, Optimizer
from llamatrain.optim.update_graph import (
    HeldGradients,
    LossAndGradients,
    clip_gradients,
    differentiate,
    hold_gradients,
    schedule_input,
    streamed_update,
    update_step,
)
from llamatrain.preference.loss import preference_loss
from llamatrain.preference.objective import Objective
from llamatrain.train.parallel.partition import ParamSlice, Partition
from llamatrain.train.rounded_weights import RoundedWeight

P = ParamSpec("P")
# Where gradients are stored: "flat" vectors, for accumulation or a minimizer; the "arena", until the update
# has clipped and used them; or "streamed": each is used at once.
Gradients = Literal["flat", "arena", "streamed"]
LOGITS = 1 << 22  # logits that are computed at a time


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """The model, sizes, precision and optimizer that the graphs of a run are built from."""

    h: Hyperparameters
    weights: Weights
    trainable: Mapping[str, Tensor]  # parameters by name, in the order of flat vectors
    batch: int
    rope_length: int  # length of the RoPE table
    precision: str
    int8: bool = False  # products with frozen weights are in 8-bit integers
    int8_copies: Mapping[str, Int8Copy] = field(default_factory=dict)  # of matrices, by name
    rounded: Mapping[str, RoundedWeight] = field(
        default_factory=dict
    )  # in quantization-aware training, by name
    threads: int
    kernels: str = "cpu"
    flash: bool = True
    squared: bool = False
    optimizer: Optimizer | None = None  # None: no training
    gradients: Gradients = "flat"
    clip: float = 0.0
    drop_base: bool = False  # release pages of the base after each read
    reads_ahead: bool = False  # and request them before it
    has_untrained_tokens: bool = False  # most tokens have no loss
    objective: Objective | None = None  # for preferences
    reference: Weights | None = None  # the reference model of the objective
    contrastive: Contrastive | None = None  # for embeddings
    grpo: Grpo | None = None  # for rewards of generated answers
    teacher: Teacher | None = None
    balance: float = 0.0  # weight of the balance loss of experts
    lora_plus: float = 1.0  # rate of adapters' B relative to all else (LoRA+, Hayou et al. 2024)
    groups: int = 1  # groups of micro-batches, which are assigned to ranks
    ranks: int = 1
    rank: int = 0
    comm_bf16: bool = False  # send gradients in bf16

    @property
    def rule(self) -> ElementwiseRule | None:
        """The optimizer, if its step is a graph as well."""
        return self.optimizer if isinstance(self.optimizer, ElementwiseRule) else None

    @property
    def evaluates(self) -> bool:
        """True if a training step also computes losses without gradients."""
        return self.contrastive is not None or (self.grpo is not None and self.grpo.keeps_log_probs)

    @property
    def dense_gradients(self) -> bool:
        """True if sparse gradients (few rows) are stored densely, like those of all other weights."""
        return self.gradients == "flat" or not (self.rule and self.rule.takes_sparse_rows)

    def describe_precision(self) -> str:
        """Return the number types of products as text."""
        kinds = dict.fromkeys(weight.kind.name.lower() for weight in self.rounded.values())
        rounding = f"weights rounded to {', '.join(kinds)}" if kinds else ""
        note = "products with the base in int8" if self.int8 else rounding
        return f"{self.precision} ({note})" if note else self.precision

    @property
    def stored(self) -> dict[Tensor, Tensor]:
        """The leaves that graphs read in place of weights that are rounded."""
        return {
            weight.rounded: weight.stored for weight in self.rounded.values() if weight.rounded is not None
        }

    @property
    def rounded_bytes(self) -> int:
        """Bytes of the rounded weights."""
        return sum(weight.stored.nbytes for weight in self.rounded.values())

    @property
    def read_weights(self) -> Weights:
        """The weights as products read them, for graphs without gradients."""
        return self.weights.with_tensors({name: weight.stored for name, weight in self.rounded.items()})

    @cached_property
    def device(self) -> Device:
        """The device that the graphs run on."""
        return create_device(self.kernels, self.threads, self.drop_base, self.reads_ahead)

    @cached_property
    def int8_weights(self) -> Int8Weights:
        """The frozen weights whose products are in 8-bit integers: matrices and experts of blocks.

        Routers and the output are exact.
        """
        if not self.int8:
            return {}
        return {
            tensor: self.int8_copies.get(name, (tensor, tensor))
            for name, tensor in self.weights.tensors.items()
            if name not in self.trainable and self.h.weight_kind(name).role in ("matrix", "experts")
        }

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the trained weights, by name."""
        return {name: tensor.shape for name, tensor in self.trainable.items()}


@dataclass(frozen=True, eq=False)
class StepGraph:
    """A graph: the outputs to run, its inputs, and the memory where results must go."""

    first: Tensor  # output: the loss, or the norm of an update graph
    outputs: list[Tensor]
    inputs: dict[str, Tensor]
    memory_names: dict[Tensor, str] = field(default_factory=dict)  # memory of outputs that other graphs read
    norm: Tensor | None = None  # if the first output is a loss
    correct: Tensor | None = None  # number of correct predictions
    rewards: Tensor | None = None  # of preferences
    log_probs: tuple[Tensor, ...] = ()  # of generated tokens, and then by the reference
    grads: dict[str, Tensor] = field(default_factory=dict)  # outputs, by weight
    terms: tuple[Tensor, ...] = ()  # terms of a preference loss, in evaluation
    parts: tuple[Tensor, ...] = ()  # loss of each unit, or terms of each, in evaluation


class ExtraOutputs(TypedDict):
    """The outputs of a training graph that metrics are computed from."""

    rewards: Tensor | None
    log_probs: tuple[Tensor, ...]


def first_or_none(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the first tensor, or None if there are none."""
    return tensors[0] if tensors else None


def uses_dropout(weights: Weights) -> bool:
    """Return True if any adapter uses dropout."""
    return any(delta.dropout for deltas in weights.deltas.values() for delta in deltas)


BuildGraph = Callable[Concatenate["StepGraphs", P], StepGraph]


def cache_graph(build: BuildGraph[P]) -> BuildGraph[P]:
    """Cache the graph that a method builds, by the method's name and arguments."""

    def cached(graphs: "StepGraphs", /, *of: P.args, **more: P.kwargs) -> StepGraph:
        """Return the cached graph, or build it."""
        key = build.__name__, *of, *more.values()
        if key not in graphs.built:
            graphs.built[key] = build(graphs, *of, **more)
        return graphs.built[key]

    return cached


class StepGraphs:
    """Builds each graph of a run once, and plans its memory once."""

    def __init__(self, spec: StepSpec, policy: Policy = "none") -> None:
        self.spec, self.policy = spec, policy
        self.table = transformer.rope_state(spec.h, spec.rope_length)
        self.states: dict[str, np.ndarray] = {}
        self._held: dict[int, HeldGradients] = {}
        self.built: dict[tuple[object, ...], StepGraph] = {}
        self._plans: dict[StepGraph, Plan] = {}
        self._trainings: dict[tuple[int, bool], transformer.TrainingGraph] = {}
        self.dropout_key = placeholder("dropout", (2,), I32) if uses_dropout(spec.weights) else None
        self.rates: dict[Tensor, Tensor] = {}
        if spec.lora_plus != 1 and spec.rule:
            row = np.ones_like(spec.rule.schedule(1, 0.0))
            row[0] = spec.lora_plus
            faster_row = state("lora_plus", row.shape)
            self.states[faster_row.name] = row
            self.rates = {
                tensor: faster_row for name, tensor in spec.trainable.items() if name.endswith(".lora_b")
            }

    def _training_graph(self, length: int, dropping: bool = True) -> transformer.TrainingGraph:
        if (length, dropping) not in self._trainings:
            key = self.dropout_key if dropping else None
            graph = self._build_training(
                replace(self.spec.weights, dropout=DropoutDelta(key) if key else None), length
            )
            if key:
                graph.inputs["dropout"] = key
            self.states |= {tensor.name: array for tensor, array in graph.more_states.items()}
            self._trainings[length, dropping] = graph
        return self._trainings[length, dropping]

    def _build_training(self, weights: Weights, length: int) -> transformer.TrainingGraph:
        spec = self.spec
        if spec.objective:
            reference, sizes = spec.reference or weights, {"batch": spec.batch, "length": length}
            return preference_loss(
                spec.objective,
                spec.h,
                weights,
                reference,
                table=self.table,
                drop_untrained=spec.has_untrained_tokens,
                flash=spec.flash,
                **sizes,
            )
        if spec.grpo:
            return grpo_loss(
                spec.grpo,
                spec.h,
                weights,
                spec.reference or weights,
                batch=spec.batch,
                length=length,
                table=self.table,
                drop_untrained=spec.has_untrained_tokens,
                flash=spec.flash,
            )
        if spec.contrastive:
            return build_embeddings(
                spec.h,
                weights,
                pooling=spec.contrastive.pooling,
                batch=spec.batch,
                length=length,
                texts=spec.contrastive.texts,
                table=self.table,
                flash=spec.flash,
            )
        return transformer.build_training(
            spec.h,
            weights,
            spec.batch,
            length,
            self.table,
            drop_untrained=spec.has_untrained_tokens,
            flash=spec.flash,
            squared=spec.squared,
            teacher=spec.teacher,
            balance=spec.balance,
        )

    def _differentiate(self, length: int) -> LossAndGradients:
        graph, trainable = self._training_graph(length), list(self.spec.trainable.values())
        extra = [graph.rewards] if graph.rewards else [*graph.log_probs]
        precision = self.spec.precision
        return differentiate(
            graph.loss,
            trainable,
            precision=precision,
            borders=graph.block_inputs,
            remat=self.policy,
            more=extra,
            int8_weights=self.spec.int8_weights,
            stored=self.spec.stored,
        )

    def _hold_gradients(self, length: int) -> HeldGradients:
        if length not in self._held:
            self._held[length] = hold_gradients(self._differentiate(length), dense=self.spec.dense_gradients)
        return self._held[length]

    @cache_graph
    def grad_graph(self, length: int, first: bool) -> StepGraph:
        """Return the graph of a batch's gradients, which overwrites (`first`) or adds to their memory."""
        held, inputs = self._hold_gradients(length), self._training_graph(length).inputs
        gradients, memory_names = held.more, dict[Tensor, str]()
        if first:
            gradients = held.first
            memory_names = {output: leaf.name for output, leaf in zip(held.first, held.memory, strict=True)}
        outputs = [held.loss, *gradients, *held.extra]
        grads = (
            {weight.name: grad for weight, grad in zip(held.blocks, gradients, strict=False)}
            if self.spec.dense_gradients
            else {}
        )
        return StepGraph(
            first=held.loss,
            outputs=outputs,
            inputs=inputs,
            memory_names=memory_names,
            **self._extra_outputs(held.extra),
            grads=grads,
        )

    @cache_graph
    def update_graph(self, length: int) -> StepGraph:
        """Return the graph of the optimizer step from the stored gradients."""
        assert self.spec.rule
        inputs, norm, outputs = update_step(
            self._hold_gradients(length), self.spec.rule, self.spec.clip, self.rates
        )
        return StepGraph(norm, outputs, {"schedule": inputs.schedule})

    # ---- of a step that is divided ------------------------------------------

    @cached_property
    def partition(self) -> Partition:
        """The partition of the gradient; buckets are in the order in which gradients become final."""
        spec, graph = self.spec, self.largest
        node_indices = {node: index for index, node in enumerate(self.plan(graph).nodes)}
        last_node = {
            name: node_indices[node]
            for name, grad in graph.grads.items()
            if (node := self.plan(graph).outputs[grad].node)
        }
        whole_weights = spec.rule is not None and not spec.rule.is_elementwise
        order = sorted(spec.trainable, key=lambda name: last_node[name])
        return Partition(
            shapes=spec.shapes,
            order=order,
            groups=spec.groups,
            ranks=spec.ranks,
            rank=spec.rank,
            whole_weights=whole_weights,
        )

    @property
    def shard_slices(self) -> list[ParamSlice]:
        """The slices of the weights that this process updates: all, unless a step is sharded and uses a rule."""
        if self.spec.groups > 1 and self.spec.rule:
            return self.partition.rank_slices(self.spec.rank)
        offsets = accumulate((prod(shape) for shape in self.spec.shapes.values()), initial=0)
        return [
            ParamSlice(name, offset, offset + prod(shape), shape, name)
            for offset, (name, shape) in zip(offsets, self.spec.shapes.items(), strict=False)
        ]

    @property
    def state_shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """The shapes of the optimizer states, by kind and by weight."""
        rule = self.spec.optimizer
        kinds = rule.states if rule else ()
        slices = self.shard_slices if rule else []
        return {
            kind: {
                part.key: part.shape
                for part in slices
                if rule and rule.has_state(kind, part.name, part.shape)
            }
            for kind in kinds
        }

    @cache_graph
    def norm_graph(self, rank: int) -> StepGraph:
        """Return the graph of the sums of squares of a rank's gradient, one per slice."""
        squares = [
            sum_sqr(state(f"{part.key}.grad", part.shape)) for part in self.partition.rank_slices(rank)
        ]
        return StepGraph(squares[0], squares, {})

    @cache_graph
    def shard_update_graph(self, rank: int) -> StepGraph:
        """Return the graph that updates a rank's slices, given the clipping factor."""
        rule = self.spec.rule
        assert rule
        schedule, factor = schedule_input(rule), placeholder("factor", ())
        rates, steps = {weight.name: row for weight, row in self.rates.items()}, list[Tensor]()
        for part in self.partition.rank_slices(rank):
            weight, grad = parameter(part.key, part.shape), state(f"{part.key}.grad", part.shape)
            row = mul(schedule, rates[part.name]) if part.name in rates else schedule
            steps += rule.update(weight, grad, row, factor)
        return StepGraph(steps[0], steps, {"schedule": schedule, "factor": factor})

    @cache_graph
    def streamed_graph(self, length: int) -> StepGraph:
        """Return the graph of a whole step in which each gradient is used and freed at once."""
        assert self.spec.rule
        gradients = self._differentiate(length)
        schedule_inputs, outputs = streamed_update(gradients, self.spec.rule, self.rates)
        _, norm = clip_gradients(gradients.gradients_for(self.spec.rule).values(), 0.0)
        inputs = self._training_graph(length).inputs | {"schedule": schedule_inputs.schedule}
        return StepGraph(
            gradients.loss,
            [*outputs, norm, *gradients.extra],
            inputs,
            norm=norm,
            **self._extra_outputs(gradients.extra),
        )

    def _extra_outputs(self, outputs: Sequence[Tensor]) -> ExtraOutputs:
        """Return the outputs of a training graph besides loss and gradients, by what they are."""
        if self.spec.grpo:
            return ExtraOutputs(rewards=None, log_probs=tuple(outputs))
        return ExtraOutputs(rewards=first_or_none(outputs), log_probs=())

    @cache_graph
    def eval_graph(self, length: int) -> StepGraph:
        """Return the graph of a batch's loss without gradients, for validation."""
        graph = self._training_graph(length, dropping=self.dropout_key is None)
        if graph.embeddings:
            outputs = self._in_precision([graph.loss, graph.embeddings])
            return StepGraph(outputs[0], outputs, graph.inputs, parts=(outputs[1],))
        if graph.log_probs:
            outputs = self._in_precision([graph.loss, *graph.log_probs])
            return StepGraph(outputs[0], outputs, graph.inputs, log_probs=tuple(outputs[1:]))
        outputs = (
            [*graph.terms, *graph.term_parts, graph.rewards]
            if graph.rewards
            else [*(graph.evaluation or (graph.loss,))]
        )
        outputs = self._in_precision(outputs)
        if graph.rewards:
            terms, parts = outputs[: len(graph.terms)], outputs[len(graph.terms) : -1]
            return StepGraph(
                outputs[0], outputs, graph.inputs, rewards=outputs[-1], terms=tuple(terms), parts=tuple(parts)
            )
        correct = outputs[1] if graph.evaluation else None
        return StepGraph(
            first=outputs[0], outputs=outputs, inputs=graph.inputs, correct=correct, parts=tuple(outputs[2:])
        )

    def _in_precision(self, outputs: list[Tensor]) -> list[Tensor]:
        """Return outputs with products in the precision of the run."""
        outputs = use_int8_products(read_stored(outputs, self.spec.stored), self.spec.int8_weights)
        return round_products(outputs) if self.spec.precision == "bf16" else outputs

    @cache_graph
    def comparison_graph(self) -> StepGraph:
        """Return the graph that compares the embeddings of a whole step."""
        assert self.spec.contrastive
        graph = build_comparison(self.spec.contrastive, self.spec.h.embd, self.table.dtype)
        outputs = [graph.loss, graph.correct, graph.row_losses, graph.gradient]
        return StepGraph(
            graph.loss, outputs, graph.inputs, correct=graph.correct, parts=(graph.row_losses, graph.gradient)
        )

    @cache_graph
    def hidden_graph(self, length: int) -> StepGraph:
        """Return the graph of the output weight's input, a row for each token that is scored."""
        spec = self.spec
        inputs = transformer.make_inputs(
            spec.batch, length, self.table.dtype, True, spec.has_untrained_tokens
        )
        weights = spec.weights.for_rows(length, inputs.get("scored_indices"))
        hidden, _ = transformer.forward(spec.h, weights, inputs, self.table)
        outputs = self._in_precision([hidden])
        used = {leaf.name for leaf in collect_leaves(outputs)}
        return StepGraph(
            outputs[0], outputs, {name: leaf for name, leaf in inputs.items() if leaf.name in used}
        )

    @cache_graph
    def logits_graph(self) -> StepGraph:
        """Return the graph of the logits of some rows of `hidden_graph`."""
        h = self.spec.h
        rows = max(1, min(self.spec.batch * self.spec.rope_length, LOGITS // h.vocab))
        hidden = placeholder("hidden", (rows, h.shapes[h.output_weight][-1]), self.table.dtype)
        outputs = self._in_precision([transformer.compute_logits(h, hidden, self.spec.weights)])
        return StepGraph(outputs[0], outputs, {"hidden": hidden})

    def plan(self, graph: StepGraph) -> Plan:
        """Return the memory plan of a graph.

        Accumulated gradients have memory of their own; otherwise they stay in the arena.
        """
        if graph not in self._plans:
            device, pinned = self.spec.device, graph.memory_names if self.spec.gradients == "flat" else ()
            self._plans[graph] = plan(
                graph.outputs,
                pinned=pinned,
                scratch=device.scratch,
                resident=device.resident_bytes,
                rewrite=device.rewrite,
            )
        return self._plans[graph]

    @property
    def largest(self) -> StepGraph:
        """The graph with the longest rows that was built: gradients, or the whole step if they are streamed."""
        length = max(length for length, _ in self._trainings)
        return (
            self.streamed_graph(length)
            if self.spec.gradients == "streamed"
            else self.grad_graph(length, True)
        )

    def build_all(
        self, lengths: Iterable[int], accumulating: bool, validating: bool
    ) -> tuple[list[StepGraph], list[StepGraph]]:
        """Build every graph that a run needs.

        The first ones share an arena; the update graphs have their own.
        """
        lengths = list(lengths)
        graphs, updates = list[StepGraph](), list[StepGraph]()
        for length in lengths:
            if self.spec.gradients != "streamed":
                graphs.append(self.grad_graph(length, True))
                if accumulating:
                    graphs.append(self.grad_graph(length, False))
            else:
                graphs.append(self.streamed_graph(length))
            if validating or self.spec.evaluates:
                graphs.append(self.eval_graph(length))
            first_flat = self.spec.gradients == "flat" and not updates
            if self.spec.rule and self.spec.groups == 1 and (first_flat or self.spec.gradients == "arena"):
                updates.append(self.update_graph(length))
        if self.spec.contrastive:
            graphs.append(self.comparison_graph())
        if self.spec.rule and self.spec.groups > 1:
            # what is planned must not depend on who plans it
            updates += [self.norm_graph(0), self.shard_update_graph(0)]
        return graphs, updates
