"""The programs of a graph: they share its weights, and each is made when it is first needed."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from llamatrain.custom.dataset import Dataset
from llamatrain.custom.graph import Graph
from llamatrain.custom.losses import Loss
from llamatrain.engine.device import Device, Memory
from llamatrain.engine.program import Program
from llamatrain.graph.tensor import Tensor, dense, placeholder
from llamatrain.optim.optimizer import ElementwiseRule
from llamatrain.optim.update_graph import differentiate, hold_gradients, update_step


@dataclass(frozen=True)
class Microbatch:
    """Samples of a dataset that a program takes at once, and the weight of each in the loss."""

    dataset: Dataset
    rows: np.ndarray
    weight: float

    def values(self, leaf: Tensor, array: np.ndarray) -> np.ndarray:
        """Return the values of a leaf. If there are too few samples, the last one is repeated."""
        missing = leaf.shape[0] - len(self.rows)
        return array[np.pad(self.rows, (0, missing), mode="edge")].astype(leaf.dtype.numpy)

    def weights(self, batch: int) -> np.ndarray:
        """Return the weights of a whole batch; repeated samples have none."""
        return np.where(np.arange(batch) < len(self.rows), self.weight, 0).astype(np.float32)


class GraphPrograms:
    """Runs a graph forward, over its weights in a device's memory."""

    def __init__(self, graph: Graph, device: Device, memory: Mapping[Tensor, Memory] | None = None) -> None:
        """Copy the weights to the device, or use `memory`, which has them already."""
        self.graph, self.device = graph, device
        self.memory = dict(memory or {})
        if not self.memory:
            for name, tensor in graph.parameters.items():
                self.memory[tensor] = device.upload(graph.weights[name])

    def create(self, outputs: Iterable[Tensor]) -> Program:
        """Return the program of a graph; outputs that have memory are written to it."""
        return Program.build(outputs, self.memory, kernels=self.device)

    def write_inputs(self, program: Program, batch: Microbatch) -> None:
        """Write the inputs of the graph."""
        for name, leaf in self.graph.inputs.items():
            program.write(leaf, batch.values(leaf, batch.dataset.inputs[name]))

    @cached_property
    def _forward(self) -> Program:
        return self.create([self.graph.output])

    def predict(self, batch: Microbatch) -> np.ndarray:
        """Return the output of each sample."""
        self.write_inputs(self._forward, batch)
        self._forward()
        return self._forward.read(self.graph.output)[: len(batch.rows)].copy()


@dataclass(frozen=True)
class BatchLoss:
    """The loss of a batch, and how many of its predictions are correct."""

    loss: float
    correct: int
    predictions: int


class LossPrograms(GraphPrograms):
    """Computes losses of a dataset's samples."""

    def __init__(
        self,
        graph: Graph,
        device: Device,
        loss: Loss,
        dataset: Dataset,
        memory: Mapping[Tensor, Memory] | None = None,
    ) -> None:
        super().__init__(graph, device, memory)
        dataset.check_inputs(graph)
        self.kind = loss
        self.targets = loss.create_targets(graph.output, dataset)
        self.sample_weights = placeholder("sample_weights", (graph.batch,))
        self.loss = loss.build(graph.output, self.targets, self.sample_weights)

    def run(self, program: Program, loss: Tensor, batch: Microbatch) -> BatchLoss:
        """Run a program that computes a loss and the output."""
        self.write_inputs(program, batch)
        program.write(self.sample_weights, batch.weights(self.graph.batch))
        targets = batch.dataset.targets
        if self.targets and targets is not None:
            program.write(self.targets, batch.values(self.targets, targets))
        program()
        value = float(program.read(loss))
        if not self.kind.has_classes or targets is None:
            return BatchLoss(value, 0, 0)
        scores = program.read(self.graph.output)[: len(batch.rows)]
        correct = self.kind.count_correct(scores, targets[batch.rows])
        return BatchLoss(value, correct, math.prod(scores.shape[:-1]))

    @cached_property
    def _evaluation(self) -> Program:
        return self.create([self.loss, self.graph.output])

    def evaluate(self, batch: Microbatch) -> BatchLoss:
        """Return the loss of a batch without changing anything."""
        return self.run(self._evaluation, self.loss, batch)


class TrainPrograms(LossPrograms):
    """Adds up gradients over the batches of a step, and updates the weights."""

    def __init__(
        self,
        graph: Graph,
        device: Device,
        loss: Loss,
        dataset: Dataset,
        rule: ElementwiseRule,
        clip: float,
    ) -> None:
        super().__init__(graph, device, loss, dataset)
        self.rule = rule
        gradients = differentiate(self.loss, list(graph.parameters.values()))
        held = hold_gradients(gradients)
        states = (state for weight in graph.parameters.values() for state in rule.states_for(weight))
        self.memory |= {state: device.allocate(state.nbytes) for state in (*held.memory, *states)}
        self.memory |= {grad: self.memory[state] for grad, state in zip(held.first, held.memory, strict=True)}
        self._value = held.loss
        self._first = self.create([held.loss, graph.output, *held.first])
        self._more = self.create([held.loss, graph.output, *held.more])
        inputs, self._norm, updates = update_step(held, rule, clip)
        self._schedule, self._update = inputs.schedule, self.create(updates)

    def add_gradients(self, batch: Microbatch, is_first: bool) -> BatchLoss:
        """Return the loss of a batch; store its gradients, or add them to those of the step."""
        return self.run(self._first if is_first else self._more, self._value, batch)

    def update(self, step: int, rate: float) -> float:
        """Update the weights, and return the norm of the gradients before clipping."""
        self._update.write(self._schedule, self.rule.schedule(step, rate))
        self._update()
        return float(self._update.read(self._norm))

    def read_weights(self) -> None:
        """Copy the weights to the graph; on a host they are in the same memory."""
        if self.device.is_host:
            return
        for name, tensor in self.graph.parameters.items():
            strides = [4 * stride for stride in dense(tensor.shape)]
            view = self.device.view(self.memory[tensor], tensor, 0, strides)
            self.graph.weights[name][...] = self.device.read(view)
