"""A plan bound to memory and kernels: a flat list of calls, to be run step after step."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from llamatrain.engine.backend import Backend, Call, Memory, Place, backend_of
from llamatrain.engine.order import layout_of, owner_of
from llamatrain.engine.plan import Plan, plan
from llamatrain.engine.recorder import Recorder, current, phase
from llamatrain.errors import GraphError
from llamatrain.graph.parts import parts_of
from llamatrain.graph.tensor import Node, Tensor


class Program:
    """Bound once; called for every step."""

    def __init__(self, plan: Plan, memory: Mapping[Tensor, Memory], backend: Backend, *, arena: Memory | None = None) -> None:
        """`memory` has some for each leaf and pinned output that is not to be made here.

        Programs that never run at once may share an `arena`, taken for the largest of them: outputs that lie in it are valid
        until the next run of any. It is the first where a plan has several.
        """
        self.plan, self.backend = plan, backend
        with phase("binding"):
            self.arenas = [backend.take(size, None if number else arena) for number, size in enumerate(plan.arenas)]
            changed = _changed(plan)
            given = {plan.outputs.get(tensor, tensor): array for tensor, array in memory.items()}
            # memory that is no part of the arena, by the tensor that owns it
            self.owned = {tensor: backend.adopt(tensor, array, owner_of(tensor) in changed) for tensor, array in given.items()}
            self._places: dict[Tensor, Place] = {}
            self.steps = [(node, self._bind(node)) for node in plan.nodes if not node.op.layout]
        self.runs = self.parts = backend.grouped(call for _, calls in self.steps for call in calls)
        if recorder := current():
            self._time(recorder)

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
        laid_out = plan(outputs, pinned=pinned, scratch=backend.scratch, resident=backend.resident, naive=naive)
        return cls(laid_out, memory, backend, arena=arena)

    def __call__(self) -> None:
        for run in self.runs:
            run()

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
            self.backend.ready(self.parts)

    def first_not_finite(self) -> Tensor | None:
        """The first tensor that holds NaN or an infinity: of the leaves, then of the values in the order they are made.

        It runs: what a step changes is changed. `graph.show.described` has words for an unnamed value.
        """
        for leaf in (leaf for role in ("parameter", "state", "input") for leaf in self.plan.leaves(role)):
            if not self.backend.finite(self._place(leaf)):
                return leaf
        for node, calls in self.steps:
            for part in self.backend.grouped(calls):
                part()
            for output in node.outputs:
                if not self.backend.finite(self._place(output), output.index in node.op.masks):
                    return output
        return None

    def _time(self, recorder: Recorder) -> None:
        """Node by node, where it trains; else as it is."""
        purposes = parts_of(self.plan.outputs.values())
        if set(purposes.values()) <= {"forward"}:
            return
        steps = [(node, self.backend.grouped(calls)) for node, calls in self.steps]
        self.parts = [part for _, parts in steps for part in parts]
        self.runs = recorder.timed(steps, purposes)

    def _place(self, tensor: Tensor) -> Place:
        if tensor not in self._places:
            seen, at = layout_of(tensor)
            owner, size = owner_of(seen), tensor.dtype.size
            memory, start = self._memory(owner)
            strides = [stride * size for stride in at.strides]
            self._places[tensor] = self.backend.place(memory, tensor, start + at.offset * size, strides)
        return self._places[tensor]

    def _memory(self, owner: Tensor) -> tuple[Memory, int]:
        """And where in it the tensor begins."""
        if owner not in self.owned and owner in self.plan.offsets:
            return self._within(self.plan.offsets[owner])
        if owner not in self.owned:
            self.owned[owner] = self.backend.take(owner.nbytes)
        return self.owned[owner], 0

    def _bind(self, node: Node) -> list[Call]:
        if not any(output.size for output in node.outputs):
            return []
        offset, size = self.plan.scratch.get(node, (0, 0))
        outs, ins = ([self._place(tensor) for tensor in tensors] for tensors in (node.outputs, node.sources))
        return self.backend.bind(node, outs, ins, self.backend.take(size, *self._within(offset)))

    def _within(self, offset: int) -> tuple[Memory, int]:
        """The arena that a place lies in, and where in it."""
        number, start = divmod(offset, self.plan.most)
        return self.arenas[number], start


def _changed(plan: Plan) -> set[Tensor]:
    """The tensors of the caller's whose memory the program writes to."""
    return {owner_of(node.sources[index]) for node in plan.nodes for index in node.aliases.values()} | plan.pinned
