"""A program: a plan bound to memory and kernels, as a flat list of calls that each step runs."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from llamatrain.engine.device import Call, Device, Memory, View, create_device
from llamatrain.engine.plan import Plan, plan
from llamatrain.engine.profiler import current_recorder, phase
from llamatrain.engine.read_ahead import find_ends, find_weight, order_reads
from llamatrain.engine.schedule import find_layout, find_owner
from llamatrain.errors import GraphError
from llamatrain.graph.dynamic_axis import (
    find_dynamic_dim,
    node_dynamic_dim,
    resize_node,
    resize_tensor,
    round_up,
)
from llamatrain.graph.node_roles import NodeRole, find_roles
from llamatrain.graph.tensor import Node, Shape, Tensor

Run = Callable[[], None]


@dataclass(frozen=True)
class Segment:
    """Consecutive nodes that all have the dynamic axis, at one length, or all do not."""

    length: int
    steps: list[tuple[Node, list[Call]]]
    batches: list[Run]  # the device's own
    runs: list[Run]  # the same, or timed ones


class Program:
    """A bound plan. It is bound once and called for every step."""

    def __init__(
        self,
        plan: Plan,
        memory: Mapping[Tensor, Memory],
        device: Device,
        *,
        arena: Memory | None = None,
        callbacks: Mapping[Tensor, Run] | None = None,
    ) -> None:
        """Bind a plan to memory and a device.

        `memory` has memory for leaves and pinned outputs; other leaves are allocated. `callbacks` run as soon
        as their output is computed, between two calls.

        Programs that never run at the same time may share an `arena`, allocated for the largest of them;
        outputs in it are valid until the next run of any. If a plan has several arenas, it is the first.
        """
        self.plan, self.device = plan, device
        with phase("binding"):
            self.arenas = [
                device.allocate(size, None if number else arena) for number, size in enumerate(plan.arenas)
            ]
            changed = _written_tensors(plan)
            given = {plan.outputs.get(tensor, tensor): array for tensor, array in memory.items()}
            # memory outside the arena, by owning tensor
            self.owned = {
                tensor: device.use_memory(tensor, array, find_owner(tensor) in changed)
                for tensor, array in given.items()
            }
            self._views: dict[tuple[Tensor, Shape], View] = {}
            self._callbacks: dict[Node | None, list[Run]] = {}
            for tensor, tell in (callbacks or {}).items():
                self._callbacks.setdefault(plan.outputs[tensor].node, []).append(tell)
            self._reads = order_reads(plan.nodes) if device.reads_ahead else {}
            nodes = (node for node in plan.nodes if not node.op.layout)
            self._groups = [
                (varying, list(group))
                for varying, group in groupby(nodes, lambda node: node_dynamic_dim(node) is not None)
            ]
            self._node_roles = _training_roles(plan) if current_recorder() else {}
            self._fixed_segments = [
                None if varying else self._bind_segment(group, 0) for varying, group in self._groups
            ]
            self.dynamic_dim = find_dynamic_dim(
                tensor for node in plan.nodes for tensor in (*node.sources, *node.outputs)
            )
            self._segments_by_length: dict[int, list[Segment]] = {}
            self._bind_length(self.dynamic_dim or 0)

    @classmethod
    def build(
        cls,
        outputs: Iterable[Tensor],
        memory: Mapping[Tensor, Memory] | None = None,
        *,
        kernels: str | Device = "cpu",
        threads: int = 1,
        drop_base: bool = False,
        arena: Memory | None = None,
        naive: bool = False,
    ) -> "Program":
        """Plan and bind a graph, for a device or for a new one of a name.

        Outputs with memory in `memory` are pinned to it.
        """
        outputs, memory = list(outputs), memory or {}
        device = create_device(kernels, threads, drop_base) if isinstance(kernels, str) else kernels
        pinned = [output for output in outputs if output in memory and output.node]
        laid_out = plan(
            outputs,
            pinned=pinned,
            scratch=device.scratch,
            resident=device.resident_bytes,
            rewrite=device.rewrite,
            naive=naive,
        )
        return cls(laid_out, memory, device, arena=arena)

    def __call__(self) -> None:
        """Run all calls."""
        for run in self.runs:
            run()

    def set_dynamic_size(self, count: int) -> None:
        """Run with `count` rows of the dynamic axis from now on, rounded up.

        Rows behind them keep their contents.
        """
        if self.dynamic_dim:
            self._bind_length(round_up(self.dynamic_dim, count))

    def _bind_length(self, length: int) -> None:
        if length not in self._segments_by_length:
            with phase("binding"):
                groups = zip(self._fixed_segments, self._groups, strict=True)
                self._segments_by_length[length] = [
                    fixed or self._bind_segment(group, length) for fixed, (_, group) in groups
                ]
        self.segments = self._segments_by_length[length]
        self.runs = [run for stretch in self.segments for run in stretch.runs]

    def read(self, tensor: Tensor) -> np.ndarray:
        """Return the contents of a leaf or output as a read-only array, valid until the next run."""
        return self.device.read(self.get_view(tensor))

    def write(self, leaf: Tensor, values: Any, at: Any = ...) -> None:
        """Write values to a leaf or a part of it; a number fills it."""
        if leaf.node:
            raise GraphError(f"cannot write {leaf!r}: this program computes it", code="not-a-leaf")
        self.device.write(self.get_view(leaf), values, at)

    def get_view(self, tensor: Tensor) -> View:
        """Return the view of a leaf or output, for another program to read or change."""
        if tensor.node and tensor not in self.plan.outputs:
            raise GraphError(
                f"{tensor!r} is not an output of this program, so its memory is reused", code="not-an-output"
            )
        return self._view(self.plan.outputs.get(tensor, tensor))

    def compile(self) -> None:
        """Compile or load everything that the program needs to run."""
        with phase("kernels"):
            self.device.compile(part for stretch in self.segments for part in stretch.batches)

    def find_not_finite(self) -> Tensor | None:
        """Run the program, and return the first tensor with NaN or infinity: leaves first, then values in order.

        Changes that a step makes are made. `graph.printing.describe` describes an unnamed value.
        """
        for leaf in (leaf for role in ("parameter", "state", "input") for leaf in self.plan.leaves(role)):
            if not self.device.is_finite(self._view(leaf)):
                return leaf
        return next((bad for stretch in self.segments if (bad := self._find_not_finite_in(stretch))), None)

    def _find_not_finite_in(self, stretch: Segment) -> Tensor | None:
        for node, calls in stretch.steps:
            for part in self.device.batch(calls, record=False):
                part()
            for output in node.outputs:
                if not self.device.is_finite(
                    self._view(output, stretch.length), output.index in node.op.masked_outputs
                ):
                    return output
        return None

    def _view(self, tensor: Tensor, length: int = 0) -> View:
        """Return the view of a tensor, with `length` rows if it has the dynamic axis."""
        shown = resize_tensor(tensor, length) if length else tensor
        key = tensor, shown.shape
        if key not in self._views:
            seen, at = find_layout(tensor)
            owner, size = find_owner(seen), tensor.dtype.size
            memory, start = self._locate(owner)
            strides = [stride * size for stride in at.strides]
            self._views[key] = self.device.view(memory, shown, start + at.offset * size, strides)
        return self._views[key]

    def _locate(self, owner: Tensor) -> tuple[Memory, int]:
        """Return the memory that a tensor owns, and the offset in it."""
        if owner not in self.owned and owner in self.plan.offsets:
            return self._find_arena(self.plan.offsets[owner])
        if owner not in self.owned:
            self.owned[owner] = self.device.allocate(owner.nbytes)
        return self.owned[owner], 0

    def _bind_segment(self, nodes: list[Node], length: int) -> Segment:
        """Bind nodes; with a recorder and a training graph, each node is timed by itself."""
        steps = [(node, self._bind(node, length)) for node in nodes]
        recorder = current_recorder()
        if not recorder or not self._node_roles:
            parts = self._batch_calls(steps)
            return Segment(length, steps, parts, parts)
        single = [
            (node, [*self.device.batch(calls, record=False), *self._callbacks.get(node, ())])
            for node, calls in steps
        ]
        timed = (
            (resize_node(node, length) if length else node, self._node_roles[node], parts)
            for node, parts in single
        )
        return Segment(
            length,
            steps,
            [part for _, parts in single for part in parts],
            recorder.time_ops(timed, self.device),
        )

    def _batch_calls(self, steps: list[tuple[Node, list[Call]]]) -> list[Run]:
        runs, waiting = list[Run](), list[Call]()
        for node, calls in steps:
            waiting += calls
            if node in self._callbacks:
                runs += [*self.device.batch(waiting), *self._callbacks[node]]
                waiting = []
        return [*runs, *self.device.batch(waiting)]

    def _bind(self, node: Node, length: int) -> list[Call]:
        if not any(output.size for output in node.outputs):
            return []
        offset, size = self.plan.scratch.get(node, (0, 0))
        outs, ins = (
            [self._view(tensor, length) for tensor in tensors] for tensors in (node.outputs, node.sources)
        )
        shown = resize_node(node, length) if length else node
        calls = self.device.bind(shown, outs, ins, self.device.allocate(size, *self._find_arena(offset)))
        return [*self._read_ahead_calls(node), *calls]

    def _read_ahead_calls(self, node: Node) -> list[Call]:
        """Return the calls that request weights which this node and later ones read."""
        calls = list[Call]()
        for reader in self._reads.get(node, ()):
            weight, ends = find_weight(reader), find_ends(reader)
            assert weight
            calls += self.device.read_ahead_calls(self._view(weight), self._view(ends) if ends else None)
        return calls

    def _find_arena(self, offset: int) -> tuple[Memory, int]:
        """Return the arena of an offset, and the offset in it."""
        number, start = divmod(offset, self.plan.max_arena)
        return self.arenas[number], start


def _training_roles(plan: Plan) -> dict[Node, NodeRole]:
    """Return the role of each node of a training graph; nothing for other graphs."""
    found = find_roles(plan.outputs.values())
    return {} if set(found.values()) <= {"forward"} else found


def _written_tensors(plan: Plan) -> set[Tensor]:
    """Return the caller's tensors whose memory the program writes to."""
    return {
        find_owner(node.sources[index]) for node in plan.nodes for index in node.aliases.values()
    } | plan.pinned
