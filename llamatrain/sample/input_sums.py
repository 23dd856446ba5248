"""Sums the squares of what each weight is multiplied with, row by row of a text."""

from collections.abc import Mapping, Sequence

import numpy as np

from llamatrain.data.batches import Batch
from llamatrain.engine.device import create_device
from llamatrain.engine.plan import Plan, plan
from llamatrain.engine.program import Program
from llamatrain.gguf.imatrix import InputSums
from llamatrain.gguf.reader import Gguf
from llamatrain.graph.tensor import Tensor, collect_leaves
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.input_sums import InputSumsGraph, build_input_sums
from llamatrain.model.load import check_memory
from llamatrain.model.lora import Weights
from llamatrain.model.transformer import rope_state


class InputMeter:
    """Measures the inputs of all weights for rows of some lengths."""

    def __init__(
        self,
        gguf: Gguf,
        h: Hyperparameters,
        weights: Weights,
        arrays: Mapping[str, np.ndarray],
        lengths: Sequence[int],
        threads: int,
    ) -> None:
        self._device = create_device("cpu", threads)
        table = rope_state(h, max(lengths))
        graphs = [build_input_sums(h, weights, length, table) for length in lengths]
        plans = [self._plan(graph) for graph in graphs]
        arena = max(each.arena for each in plans)
        check_memory(gguf, arena, "a smaller --ctx")
        memory = self._device.allocate(arena)
        tables = {table: h.rope_table(max(lengths))}
        self._programs = {
            length: (graph, Program(planned, tables | leaves_of(graph, arrays), self._device, arena=memory))
            for length, graph, planned in zip(lengths, graphs, plans, strict=True)
        }

    def _plan(self, graph: InputSumsGraph) -> Plan:
        device = self._device
        return plan(
            graph.outputs, scratch=device.scratch, resident=device.resident_bytes, rewrite=device.rewrite
        )

    def measure(self, batch: Batch) -> dict[str, InputSums]:
        """Return the sums of a batch of one row, by weight."""
        (length,) = batch.tokens.shape[1:]
        graph, program = self._programs[length]
        for name, leaf in graph.inputs.items():
            program.write(leaf, getattr(batch, name))
        program.write(graph.present, np.arange(length) < batch.size)
        program()
        counts = {name: program.read(count)[:, 0].astype(np.float64) for name, count in graph.counts.items()}
        tokens = np.array([batch.size], np.float64)
        return {
            name: InputSums(program.read(squares).astype(np.float64), counts.get(name, tokens))
            for name, squares in graph.squares.items()
        }


def leaves_of(graph: InputSumsGraph, arrays: Mapping[str, np.ndarray]) -> dict[Tensor, np.ndarray]:
    """Return the memory of the leaves of a graph that are not inputs."""
    named = {leaf: arrays[leaf.name] for leaf in collect_leaves(graph.outputs) if leaf.name in arrays}
    identity = {graph.identity: np.eye(graph.identity.shape[0], dtype=np.float32)}
    return named | (identity if graph.counts else {})


def add_sums(total: dict[str, InputSums], new: Mapping[str, InputSums]) -> None:
    """Add sums to those of earlier rows."""
    for name, (squares, counts) in new.items():
        before = total.get(name, InputSums(np.zeros(1), np.zeros(1)))
        total[name] = InputSums(before.squares + squares, before.counts + counts)
