"""A plan bound to memory and kernels: a flat list of calls, to be run step after step."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from llamatrain.engine.backend import Backend, Call, Memory, Place, backend_of
from llamatrain.engine.plan import Plan, plan
from llamatrain.engine.profiler import current, phase
from llamatrain.engine.schedule import layout_of, owner_of
from llamatrain.errors import GraphError
from llamatrain.graph.dynamic_axis import cut, most_of, shorter, varies, whole
from llamatrain.graph.node_roles import Part, parts_of
from llamatrain.graph.tensor import Node, Shape, Tensor

Run = Callable[[], None]


@dataclass(frozen=True)
class Segment:
    """Nodes one after the other that vary, in one length, or do not; with their calls, and those as a few things that run."""

    length: int
    steps: list[tuple[Node, list[Call]]]
    parts: list[Run]  # the backend's own
    runs: list[Run]  # the same, or these with a clock around them


class Program:
    """Bound once; called for every step."""

    def __init__(
        self,
        plan: Plan,
        memory: Mapping[Tensor, Memory],
        backend: Backend,
        *,
        arena: Memory | None = None,
        told: Mapping[Tensor, Run] | None = None,
    ) -> None:
        """`memory` has some for each leaf and pinned output that is not to be made here. Who waits for an output is `told` as
        soon as it is there, between two calls.

        Programs that never run at once may share an `arena`, taken for the largest of them: outputs that lie in it are valid
        until the next run of any. It is the first where a plan has several.
        """
        self.plan, self.backend = plan, backend
        with phase("binding"):
            self.arenas = [
                backend.take(size, None if number else arena) for number, size in enumerate(plan.arenas)
            ]
            changed = _changed(plan)
            given = {plan.outputs.get(tensor, tensor): array for tensor, array in memory.items()}
            # memory that is no part of the arena, by the tensor that owns it
            self.owned = {
                tensor: backend.adopt(tensor, array, owner_of(tensor) in changed)
                for tensor, array in given.items()
            }
            self._places: dict[tuple[Tensor, Shape], Place] = {}
            self._told: dict[Node | None, list[Run]] = {}
            for tensor, tell in (told or {}).items():
                self._told.setdefault(plan.outputs[tensor].node, []).append(tell)
            nodes = (node for node in plan.nodes if not node.op.layout)
            self._groups = [
                (varying, list(group))
                for varying, group in groupby(nodes, lambda node: varies(node) is not None)
            ]
            self._purposes = _purposes(plan) if current() else {}
            self._fixed = [None if varying else self._stretch(group, 0) for varying, group in self._groups]
            self.most = most_of(tensor for node in plan.nodes for tensor in (*node.sources, *node.outputs))
            self._lengths: dict[int, list[Segment]] = {}
            self._cut(self.most or 0)

    @classmethod
    def of(
        cls,
        outputs: Iterable[Tensor],
        memory: Mapping[Tensor, Memory] | None = None,
        *,
        kernels: str = "cpu",
        threads: int = 1,
        drop_base: bool = False,
        arena: Memory | None = None,
        naive: bool = False,
    ) -> "Program":
        """Plan and bind in one go; outputs that `memory` is given for are pinned to it."""
        outputs, memory, backend = list(outputs), memory or {}, backend_of(kernels, threads, drop_base)
        pinned = [output for output in outputs if output in memory and output.node]
        laid_out = plan(
            outputs, pinned=pinned, scratch=backend.scratch, resident=backend.resident, naive=naive
        )
        return cls(laid_out, memory, backend, arena=arena)

    def __call__(self) -> None:
        for run in self.runs:
            run()

    def cut(self, count: int) -> None:
        """Go on with so many rows of what varies, or the next that can be; what lies behind them is left as it is."""
        if self.most:
            self._cut(whole(self.most, count))

    def _cut(self, length: int) -> None:
        if length not in self._lengths:
            with phase("binding"):
                groups = zip(self._fixed, self._groups, strict=True)
                self._lengths[length] = [
                    fixed or self._stretch(group, length) for fixed, (_, group) in groups
                ]
        self.stretches = self._lengths[length]
        self.runs = [run for stretch in self.stretches for run in stretch.runs]

    def read(self, tensor: Tensor) -> np.ndarray:
        """What a leaf or an output holds; valid until the next run, and not to be written to."""
        return self.backend.read(self.memory_of(tensor))

    def write(self, leaf: Tensor, values: Any, at: Any = ...) -> None:
        """Put values into a leaf, or into a part of it; a number fills it."""
        if leaf.node:
            raise GraphError(f"{leaf!r} is computed by this program, and not to be written")
        self.backend.write(self.memory_of(leaf), values, at)

    def memory_of(self, tensor: Tensor) -> Place:
        """Where a leaf or an output lies, for another program that is to read or change it."""
        if tensor.node and tensor not in self.plan.outputs:
            raise GraphError(f"{tensor!r} is no output of this program, so nothing of it is kept")
        return self._place(self.plan.outputs.get(tensor, tensor))

    def ready(self) -> None:
        """Have all there that it needs to run."""
        with phase("kernels"):
            self.backend.ready(part for stretch in self.stretches for part in stretch.parts)

    def first_not_finite(self) -> Tensor | None:
        """The first tensor that holds NaN or an infinity: of the leaves, then of the values in the order they are made.

        It runs: what a step changes is changed. `graph.show.described` has words for an unnamed value.
        """
        for leaf in (leaf for role in ("parameter", "state", "input") for leaf in self.plan.leaves(role)):
            if not self.backend.finite(self._place(leaf)):
                return leaf
        return next((bad for stretch in self.stretches if (bad := self._not_finite(stretch))), None)

    def _not_finite(self, stretch: Segment) -> Tensor | None:
        for node, calls in stretch.steps:
            for part in self.backend.grouped(calls):
                part()
            for output in node.outputs:
                if not self.backend.finite(
                    self._place(output, stretch.length), output.index in node.op.masks
                ):
                    return output
        return None

    def _place(self, tensor: Tensor, length: int = 0) -> Place:
        """Of so many rows of it, if it varies; of all without."""
        shown = shorter(tensor, length) if length else tensor
        key = tensor, shown.shape
        if key not in self._places:
            seen, at = layout_of(tensor)
            owner, size = owner_of(seen), tensor.dtype.size
            memory, start = self._memory(owner)
            strides = [stride * size for stride in at.strides]
            self._places[key] = self.backend.place(memory, shown, start + at.offset * size, strides)
        return self._places[key]

    def _memory(self, owner: Tensor) -> tuple[Memory, int]:
        """And where in it the tensor begins."""
        if owner not in self.owned and owner in self.plan.offsets:
            return self._within(self.plan.offsets[owner])
        if owner not in self.owned:
            self.owned[owner] = self.backend.take(owner.nbytes)
        return self.owned[owner], 0

    def _stretch(self, nodes: list[Node], length: int) -> Segment:
        """Where somebody asked for the time of each, and it trains, node by node."""
        steps = [(node, self._bind(node, length)) for node in nodes]
        recorder = current()
        if not recorder or not self._purposes:
            parts = self._grouped(steps)
            return Segment(length, steps, parts, parts)
        single = [(node, [*self.backend.grouped(calls), *self._told.get(node, ())]) for node, calls in steps]
        timed = (
            (cut(node, length) if length else node, self._purposes[node], parts) for node, parts in single
        )
        return Segment(length, steps, [part for _, parts in single for part in parts], recorder.timed(timed))

    def _grouped(self, steps: list[tuple[Node, list[Call]]]) -> list[Run]:
        runs, waiting = list[Run](), list[Call]()
        for node, calls in steps:
            waiting += calls
            if node in self._told:
                runs += [*self.backend.grouped(waiting), *self._told[node]]
                waiting = []
        return [*runs, *self.backend.grouped(waiting)]

    def _bind(self, node: Node, length: int) -> list[Call]:
        if not any(output.size for output in node.outputs):
            return []
        offset, size = self.plan.scratch.get(node, (0, 0))
        outs, ins = (
            [self._place(tensor, length) for tensor in tensors] for tensors in (node.outputs, node.sources)
        )
        shown = cut(node, length) if length else node
        return self.backend.bind(shown, outs, ins, self.backend.take(size, *self._within(offset)))

    def _within(self, offset: int) -> tuple[Memory, int]:
        """The arena that a place lies in, and where in it."""
        number, start = divmod(offset, self.plan.most)
        return self.arenas[number], start


def _purposes(plan: Plan) -> dict[Node, Part]:
    """What nodes are for, where it trains."""
    found = parts_of(plan.outputs.values())
    return {} if set(found.values()) <= {"forward"} else found


def _changed(plan: Plan) -> set[Tensor]:
    """The tensors of the caller's whose memory the program writes to."""
    return {
        owner_of(node.sources[index]) for node in plan.nodes for index in node.aliases.values()
    } | plan.pinned
