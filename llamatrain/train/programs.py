"""The programs of a run over shared memory. Leaves of their graphs are bound by name.

Parameters, gradients and moments are flat vectors with one layout, in the order of the weights.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from llamatrain.contrastive.loss import comparison_inputs
from llamatrain.data.batches import Batch, StepTotals
from llamatrain.engine.device import Device, Memory, View
from llamatrain.engine.profiler import phase
from llamatrain.engine.program import Program
from llamatrain.graph.printing import describe
from llamatrain.graph.tensor import Tensor, collect_leaves, state
from llamatrain.grpo.metrics import RolloutStats
from llamatrain.io.madvise import release_pages
from llamatrain.model import transformer
from llamatrain.model.limits import MANY_LAYERS
from llamatrain.platform.memory import allocate
from llamatrain.platform.terminal import log_if_slow
from llamatrain.preference.batch import Rewards
from llamatrain.preference.inputs import InputSource
from llamatrain.train.graphs import StepGraph, StepGraphs
from llamatrain.train.inputs import MASKS, STEP_INPUTS, input_array
from llamatrain.train.rounded_weights import EncodeWeight, RoundedWeights

PIECE = 1 << 22  # numbers of a vector that are copied or checked at a time
DropoutKey = tuple[int, int]  # seed and first row of a batch


class FlatParams:
    """One flat vector for all weights, or for one value per weight, in a device's memory.

    Initialization, checkpoints and minimizers use `vector` and its parts: on a host they are the memory itself,
    elsewhere a copy, which `pull` and `push` bring up to date.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: Device) -> None:
        sizes = [int(np.prod(shape)) for shape in shapes.values()]
        self.device = device
        self.memory = device.allocate(4 * sum(sizes))
        self.vector = (self.memory if device.is_host else allocate(4 * sum(sizes))).view(np.float32)
        self.offsets = [0, *accumulate(sizes)]
        self.parts = {
            name: self.vector[start : start + size].reshape(shape)
            for (name, shape), start, size in zip(shapes.items(), self.offsets, sizes, strict=False)
        }

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Copy values for some weights, and release the pages of the mapped file they come from."""
        for name, array in arrays.items():
            self.parts[name][...] = array
            release_pages(array)
        self.push()

    def pull(self, ranges: Sequence[slice] = (slice(None),)) -> "FlatParams":
        """Copy the device's memory, or ranges of it, to the vector; on a host there is nothing to do."""
        for part in () if self.device.is_host else self._pieces(ranges):
            self.vector[part] = self.device.read(self._view(part))
        return self

    def push(self) -> None:
        """Copy the vector to the device's memory; on a host there is nothing to do."""
        for part in () if self.device.is_host else self._pieces():
            self.device.write(self._view(part), self.vector[part])

    def is_finite(self) -> bool:
        """Return True if no value is NaN or infinite."""
        return all(self.device.is_finite(self._view(part)) for part in self._pieces())

    def _pieces(self, ranges: Sequence[slice] = (slice(None),)) -> Iterator[slice]:
        """Yield parts of ranges that are small enough to be copied or checked at a time."""
        for start, stop, _ in (part.indices(self.vector.size) for part in ranges):
            for first in range(start, stop, PIECE):
                yield slice(first, min(stop, first + PIECE))

    def _view(self, part: slice) -> View:
        memory = self.slice_memory(part.start, part.stop)
        return self.device.view(memory, state("part", (part.stop - part.start,)), 0, (4,))

    def slice_memory(self, start: int, stop: int) -> Memory:
        """Return the memory of a part of the vector."""
        return self.device.allocate(4 * (stop - start), self.memory, 4 * start)

    def with_suffix(self, suffix: str) -> dict[str, Memory]:
        """Return the memory of each weight by name, with a suffix such as ".grad"."""
        ranges = zip(self.parts, pairwise(self.offsets), strict=True)
        return {f"{name}{suffix}": self.slice_memory(*ends) for name, ends in ranges}


class Comparison(NamedTuple):
    """The contrastive loss of a step, and its gradient with respect to each embedding."""

    loss: float
    correct: int  # queries whose positive is the most similar text
    row_losses: np.ndarray
    gradient: np.ndarray  # (rows, texts, width)


class EvalPrograms:
    """Runs evaluation graphs over given arrays. Programs are compiled when they are first needed."""

    def __init__(self, graphs: StepGraphs, memory: Mapping[str, Memory], arena: int) -> None:
        self.graphs, self.spec, self.arena = graphs, graphs.spec, graphs.spec.device.allocate(arena)
        table = self.spec.h.rope_table(self.spec.rope_length)
        self.memory = {**memory, graphs.table.name: self.spec.device.upload(table)}  # by the name of a leaf
        self._programs: dict[tuple[str, int], BoundGraph] = {}
        self._last: BoundGraph | None = None

    def eval_loss(self, batch: Batch) -> tuple[float, int | None]:
        """Return the loss of a batch, a sum over tokens, and the number of correct predictions if counted."""
        length = batch.tokens.shape[1]
        bound = self.eval_program(length).feed(batch, StepTotals())
        loss, correct = self.run(bound), bound.graph.correct
        return loss, None if correct is None else int(bound.program.read(correct))

    def rewards(self, batch: Batch) -> Rewards | RolloutStats | None:
        """Return the rewards of the answers in the last batch, or None without preferences and answers."""
        graph = self._last.graph if self._last else None
        if graph and graph.log_probs and self.spec.grpo:
            return RolloutStats.from_batch(batch, self.log_probs(batch), self.spec.grpo)
        if not (self._last and graph and graph.rewards):
            return None
        return Rewards.from_batch(batch, self._last.program.read(graph.rewards))

    def loss_terms(self) -> list[float]:
        """Return the terms that the last evaluated loss is the sum of."""
        assert self._last
        return [float(self._last.program.read(term)) for term in self._last.graph.terms]

    def loss_parts(self) -> list[np.ndarray]:
        """Return what each pair or answer adds to the terms that were evaluated last."""
        assert self._last
        return [self._last.program.read(part) for part in self._last.graph.parts]

    def token_losses(self, batch: Batch) -> np.ndarray:
        """Return what each token with a weight adds to the loss that was evaluated last."""
        (losses,), positions = self.loss_parts(), np.flatnonzero(batch.weights)
        assert self._last
        return losses[: len(positions)] if "scored_indices" in self._last.graph.inputs else losses[positions]

    def log_probs(self, batch: Batch) -> list[np.ndarray]:
        """Return the log-probabilities of the trained tokens in the last batch, and those by the reference."""
        assert self._last
        outputs = (self._last.program.read(tensor) for tensor in self._last.graph.log_probs)
        positions = np.flatnonzero(batch.weights)
        if "scored_indices" in self._last.graph.inputs:
            positions = np.arange(len(positions))
        return [output[positions] for output in outputs]

    def embed(self, batch: Batch) -> np.ndarray:
        """Return the embeddings of a batch's texts: (rows, texts, width)."""
        assert batch.texts
        self.run(self.eval_program(batch.tokens.shape[1]).feed(batch, StepTotals()))
        (embeddings,) = self.loss_parts()
        return np.array(embeddings).reshape(*batch.texts.present.shape, -1)

    def compare(self, embeddings: np.ndarray, present: np.ndarray) -> "Comparison":
        """Compare the texts of a step: (rows, texts, width), of which some exist."""
        bound = self.get_program("comparison", 0, self.graphs.comparison_graph)
        loss = self.run(bound.write(comparison_inputs(embeddings, present)))
        assert bound.graph.correct
        row_losses, gradient = (np.array(part) for part in self.loss_parts())
        return Comparison(loss, int(bound.program.read(bound.graph.correct)), row_losses, gradient)

    def scored_logits(self, batch: Batch) -> Iterator[np.ndarray]:
        """Yield the logits at the tokens with a weight, some at a time; each array is valid until the next."""
        length, positions = batch.tokens.shape[1], np.flatnonzero(batch.weights)
        bound = self.get_program("hidden", length, lambda: self.graphs.hidden_graph(length))
        bound.feed(batch, StepTotals()).program()
        hidden = bound.program.read(bound.graph.first)
        if "scored_indices" in bound.graph.inputs:
            positions = np.arange(len(positions))
        hidden = hidden[positions]  # a copy, as the programs share an arena
        output = self.get_program("logits", 0, self.graphs.logits_graph)
        leaf = output.graph.inputs["hidden"]
        for start in range(0, len(hidden), leaf.shape[0]):
            part = hidden[start : start + leaf.shape[0]]
            output.program.write(leaf, 0)
            output.program.write(leaf, part, np.s_[: len(part)])
            output.program()
            yield output.program.read(output.graph.first)[: len(part)]

    def eval_program(self, length: int) -> "BoundGraph":
        """Return the evaluation program for rows of this length."""
        return self.get_program("loss", length, lambda: self.graphs.eval_graph(length))

    def get_program(self, kind: str, length: int, build: Callable[[], StepGraph]) -> "BoundGraph":
        """Return the program of a kind and length, and build it if it is missing."""
        if (kind, length) not in self._programs:
            with phase("planning"):
                graph = build()
            callbacks = self.output_callbacks(graph)
            self._programs[kind, length] = BoundGraph(
                self.graphs, graph, self.all_memory(), self.arena, callbacks
            )
        return self._programs[kind, length]

    def all_memory(self) -> dict[str, Memory]:
        """Return the memory of all leaves that the graphs built so far have, besides their inputs."""
        for name, array in self.graphs.states.items():
            if name not in self.memory:
                self.memory[name] = self.spec.device.upload(array)
        return self.memory

    def output_callbacks(self, graph: StepGraph) -> dict[Tensor, Callable[[], None]]:
        """Return callbacks to run as soon as an output of the graph is computed."""
        return {}

    def run(self, bound: "BoundGraph") -> float:
        """Run a program and return its first output."""
        self._last = bound
        return bound.run()

    def first_nonfinite(self) -> str:
        """Describe the first tensor with NaN or infinity in the last run.

        The weights are unusable afterwards.
        """
        tensor = self._last.program.find_not_finite() if self._last else None
        return describe(tensor) if tensor is not None else "none (it arises in the sum)"


class TrainPrograms(EvalPrograms):
    """The programs of training, with the memory of weights, gradients and optimizer states."""

    exposed_seconds: float | None = None  # seconds of this step spent waiting for other ranks

    def __init__(
        self,
        graphs: StepGraphs,
        arena: int,
        frozen: Mapping[str, Memory] | None = None,
        encode: EncodeWeight | None = None,
    ) -> None:
        """Allocate the memory; `encode` encodes weights that are rounded."""
        spec, shapes, device = graphs.spec, graphs.spec.shapes, graphs.spec.device
        self.weights = FlatParams(shapes, device)
        self.grads = FlatParams(shapes, device) if spec.gradients == "flat" else None
        self.states = {
            kind: FlatParams(state_shapes, device) for kind, state_shapes in graphs.state_shapes.items()
        }
        memory = {**(frozen or {}), **self.weights.with_suffix("")}
        for kind, flat in self.states.items():
            memory |= flat.with_suffix(f".{kind}")
        if self.grads:
            memory |= self.grads.with_suffix(".grad")
        self.rounded = RoundedWeights(spec.rounded, encode, device, spec.threads) if encode else None
        memory |= self.rounded.memory if self.rounded else {}
        super().__init__(graphs, memory, arena)

    def compile_for(self, batches: Sequence[Batch]) -> float:
        """Compile the programs that these batches need, and return the seconds that took."""
        start, layers = time.perf_counter(), self.spec.h.layers
        with (
            log_if_slow(f"compiling programs for {layers:,} layers; this takes a while")
            if layers > MANY_LAYERS
            else nullcontext()
        ):
            for number, batch in enumerate(batches):
                length = batch.tokens.shape[1]
                if self.spec.gradients == "streamed":
                    self._streamed_program(length)
                else:
                    self._last_grad_program = self._grad_program(length, self.starts_sum(number))
            if self.spec.gradients != "streamed" and self.spec.rule:
                self._compile_update()
        for bound in list(self._programs.values()):  # compiled ahead
            bound.program.compile()
        return time.perf_counter() - start

    def round_weights(self) -> None:
        """Round the weights that products read, after those that are trained have changed."""
        if self.rounded and self.rounded.weights:
            self.rounded.update(self.weights.pull().parts)

    def full_state(self, kind: str) -> Any:
        """Return an optimizer state of all weights as one vector."""
        return self.states[kind].pull().vector

    def send_state(self, kind: str) -> None:
        """Send this rank's part of a state to rank 0, which saves it.

        With one rank there is nothing to do.
        """

    def load_state(self, kind: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Load an optimizer state from a checkpoint."""
        self.states[kind].load(arrays)

    def local_microbatches(self, batches: int) -> range:
        """Return the indices of a step's micro-batches that this process runs."""
        return range(batches)

    def wait(self) -> None:
        """Wait until the reduction that runs in parallel to the gradients is done."""

    def starts_sum(self, index: int) -> bool:
        """Return True if this micro-batch starts a sum of gradients, instead of adding to one."""
        return index == 0

    def compute_gradients(
        self, batch: Batch, totals: StepTotals, index: int, key: DropoutKey = (0, 0)
    ) -> float:
        """Return the batch's share of the step's loss, and store or add its gradients.

        `totals` has the sums of weights of the whole step.
        """
        self._last_grad_program = self._grad_program(batch.tokens.shape[1], self.starts_sum(index))
        return self.run(self._last_grad_program.feed(batch, totals, key))

    def total_gradient(self) -> np.ndarray:
        """Return the gradient of the whole step."""
        assert self.grads
        return self.grads.pull().vector

    def update_weights(self, step: int, rate: float) -> float:
        """Update the weights by the stored gradients; return the gradients' norm before clipping."""
        return self.run(self._update_program(self._last_grad_program).set_schedule(step, rate))

    def streamed_step(
        self, batch: Batch, totals: StepTotals, step: int, rate: float, key: DropoutKey = (0, 0)
    ) -> tuple[float, float]:
        """Run a whole step without memory for gradients; return loss and norm."""
        bound = self._streamed_program(batch.tokens.shape[1])
        loss = self.run(bound.feed(batch, totals, key).set_schedule(step, rate))
        assert bound.graph.norm
        return loss, float(bound.program.read(bound.graph.norm))

    # ---- programs, made once -----------------------------------------------

    def _grad_program(self, length: int, first: bool) -> "BoundGraph":
        return self.get_program(
            "first" if first else "more", length, lambda: self.graphs.grad_graph(length, first)
        )

    def _streamed_program(self, length: int) -> "BoundGraph":
        return self.get_program("streamed", length, lambda: self.graphs.streamed_graph(length))

    def _compile_update(self) -> None:
        self._update_program(self._last_grad_program)

    def _update_program(self, grad_program: "BoundGraph") -> "BoundGraph":
        # gradients in the arena are read where each length's program left them; the update has its own arena
        arena = self.spec.gradients == "arena"
        key = "update", grad_program.length if arena else 0
        if key not in self._programs:
            grad_memory = (
                {
                    name: grad_program.program.get_view(grad)
                    for grad, name in grad_program.graph.memory_names.items()
                }
                if arena
                else {}
            )
            arrays = grad_memory | self.all_memory()
            with phase("planning"):
                graph = self.graphs.update_graph(grad_program.length)
            self._programs[key] = BoundGraph(self.graphs, graph, arrays)
        return self._programs[key]


class BoundGraph:
    """A graph with its plan and memory, compiled to a program."""

    def __init__(
        self,
        graphs: StepGraphs,
        graph: StepGraph,
        arrays: Mapping[str, Memory],
        arena: Memory | None = None,
        output_callbacks: Mapping[Tensor, Callable[[], None]] | None = None,
    ) -> None:
        self.graph, self.rule, self.objective = graph, graphs.spec.rule, graphs.spec.objective
        with phase("planning"):
            plan = graphs.plan(graph)
        memory = {leaf: arrays[leaf.name] for leaf in collect_leaves(graph.outputs) if leaf.name in arrays}
        memory |= {
            output: arrays[name]
            for output, name in graph.memory_names.items()
            if plan.outputs[output] in plan.pinned
        }
        self.program = Program(plan, memory, graphs.spec.device, arena=arena, callbacks=output_callbacks)

    @property
    def length(self) -> int:
        """The number of tokens per row."""
        return self.graph.inputs["tokens"].shape[1]

    def feed(self, batch: Batch, totals: StepTotals, key: DropoutKey = (0, 0)) -> "BoundGraph":
        """Write the inputs for a batch."""
        source = InputSource(
            batch=batch,
            totals=totals,
            drops_untrained="scored_indices" in self.graph.inputs,
            objective=self.objective,
            dropout_key=key,
        )
        self.program.set_dynamic_size(source.scored_tokens)
        for name, tensor in self.graph.inputs.items():
            if name in MASKS:
                for queries, mask in transformer.dense_mask_chunks(MASKS[name](source)):
                    self.program.write(tensor, mask, np.s_[:, queries])
            elif name not in STEP_INPUTS:
                self._write(tensor, input_array(name, source))
        return self

    def _write(self, tensor: Tensor, array: np.ndarray) -> None:
        """Write an array; if it is shorter than a vector, set the rest to zero."""
        if array.ndim != 1:
            self.program.write(tensor, array.reshape(tensor.shape) if array.ndim else array)
            return
        if len(array) < tensor.size:
            self.program.write(tensor, 0)
        self.program.write(tensor, array, np.s_[: len(array)])

    def write(self, arrays: Mapping[str, np.ndarray]) -> "BoundGraph":
        """Write inputs by name."""
        for name, array in arrays.items():
            self.program.write(self.graph.inputs[name], array)
        return self

    def set_schedule(self, step: int, rate: float) -> "BoundGraph":
        """Write the optimizer's numbers for a step."""
        assert self.rule
        self.program.write(self.graph.inputs["schedule"], self.rule.schedule(step, rate))
        return self

    def run(self) -> float:
        """Run the program and return its first output, such as the loss."""
        self.program()
        return float(self.program.read(self.graph.first))
