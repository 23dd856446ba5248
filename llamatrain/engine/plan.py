"""The graph allocator: from an order of nodes to places in one arena, before there is any memory.

Best fit over the free gaps of an arena that grows as it must; a value is freed after its last reader; an op may take over the
memory of a source that dies with it; views and changes in place follow their owner; leaves, and values that are pinned to
memory of the caller's, are left alone. Scratch memory of a kernel lives as long as its call.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from llamatrain.engine.order import make_contiguous, ordered, owner_of
from llamatrain.errors import MemoryPlanError
from llamatrain.graph.ops import cont
from llamatrain.graph.show import verify
from llamatrain.graph.tensor import Node, Tensor, leaves_of

ALIGNMENT = 64

ScratchRule = Callable[[Node], int]


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Arena:
    """Free gaps below a top that only grows. Offsets and sizes in bytes; 64-bit and beyond, being Python's."""

    def __init__(self) -> None:
        self.top = 0
        self.gaps: list[tuple[int, int]] = []  # (offset, size), sorted, never adjacent

    def take(self, size: int) -> int:
        """The offset of the smallest gap that holds this many bytes, or of new ground."""
        size = aligned(size)
        fitting = [(length, offset) for offset, length in self.gaps if length >= size]
        if fitting:
            length, offset = min(fitting)
            self.gaps.remove((offset, length))
            if length > size:
                insort(self.gaps, (offset + size, length - size))
            return offset
        offset = self.top
        if self.gaps and sum(self.gaps[-1]) == self.top:  # grow the last gap
            offset = self.gaps.pop()[0]
        self.top = offset + size
        return offset

    def give(self, offset: int, size: int) -> None:
        """Free what `take` gave; joins its neighbours."""
        end = offset + aligned(size)
        if end == offset:
            return
        place = bisect_left(self.gaps, (offset, 0))
        if place < len(self.gaps) and self.gaps[place][0] == end:
            end = sum(self.gaps.pop(place))
        if place and sum(self.gaps[place - 1]) == offset:
            place -= 1
            offset = self.gaps.pop(place)[0]
        self.gaps.insert(place, (offset, end - offset))


@dataclass
class Plan:
    """Where every value lies, and what that costs."""

    outputs: dict[Tensor, Tensor]  # as asked for: as laid out
    nodes: list[Node]
    offsets: dict[Tensor, int]  # of the tensors that own memory in the arena
    scratch: dict[Node, tuple[int, int]]  # offset and size
    arena: int
    without_reuse: int
    pinned: frozenset[Tensor]
    peak_at: Node | None = None
    alive_at_peak: list[tuple[str, int]] = field(default_factory=list)
    taken_over: int = 0  # values that lie where one of their sources lay

    def leaves(self, role: str) -> list[Tensor]:
        return [leaf for leaf in leaves_of(self.outputs.values()) if leaf.role == role]

    def bytes(self, role: str) -> int:
        return sum(leaf.nbytes for leaf in self.leaves(role))

    @property
    def pinned_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.pinned)

    @property
    def total(self) -> int:
        return self.arena + self.pinned_bytes + sum(self.bytes(role) for role in ("input", "parameter", "state"))

    def report(self, most: int = 8) -> str:
        """What a run will take, in words."""
        kinds = [(role, self.bytes(role)) for role in ("parameter", "state", "input")]
        lines = [f"{name:12} {size:>18,} bytes" for name, size in [*kinds, ("pinned", self.pinned_bytes), ("arena", self.arena)]]
        lines.append(f"{'total':12} {self.total:>18,} bytes")
        saved = 1 - self.arena / self.without_reuse if self.without_reuse else 0.0
        lines.append(f"without reuse the arena would take {self.without_reuse:,} bytes: {saved:.0%} saved")
        if self.peak_at:
            lines.append(f"the arena is fullest at {self.peak_at!r}, when it holds")
            lines += [f"  {size:>16,}  {name}" for name, size in self.alive_at_peak[:most]]
        return "\n".join(lines)


def plan(
    outputs: Iterable[Tensor],
    *,
    pinned: Iterable[Tensor] = (),
    scratch: ScratchRule = lambda node: 0,
    memory: int | None = None,
    naive: bool = False,
) -> Plan:
    """Lay the graph out. Of the two evaluation orders the one with the lower peak is taken.

    `pinned` are outputs that the caller holds memory for. `memory` is a limit for everything together, in bytes. A naive plan
    gives each value memory of its own: where it gives other results than the usual one, the planner is wrong, not a kernel.
    """
    asked, pinned = list(dict.fromkeys(outputs)), set(pinned)
    own = [cont(output) if output in pinned and owner_of(output) is not output else output for output in asked]
    laid = dict(zip(asked, make_contiguous(own), strict=True))
    pins = frozenset(laid[tensor] for tensor in pinned)
    verify(laid.values())
    candidates = (ordered(list(laid.values()), left_to_right) for left_to_right in (True, False))
    best = min((_lay_out(nodes, laid, pins, scratch, naive) for nodes in candidates), key=lambda each: each.arena)
    if memory is not None and best.total > memory:
        raise MemoryPlanError(does_not_fit(best, memory))
    return best


def does_not_fit(plan: Plan, memory: int) -> str:
    """How much is missing, and what would help."""
    missing = plan.total - memory
    helps = []
    if plan.arena > missing:
        helps.append("recomputation (remat), a smaller batch or a shorter context shrink the arena")
    if plan.bytes("state") + plan.pinned_bytes > missing:
        helps.append("training fewer weights (LoRA) saves gradients and moments")
    helps = helps or ["a smaller model"]
    return (
        f"needs {plan.total:,} bytes ({plan.arena:,} of them for the arena), "
        f"which is {missing:,} more than the {memory:,} given; {'; '.join(helps)}"
    )


def _lay_out(
    nodes: Sequence[Node], outputs: dict[Tensor, Tensor], pinned: frozenset[Tensor], scratch: ScratchRule, naive: bool
) -> Plan:
    dies = _last_uses(nodes, outputs.values())
    mine = Plan(outputs, list(nodes), {}, {}, 0, 0, pinned)
    arena = Arena()
    alive: dict[Tensor, int] = {}  # owners in the arena, and their bytes
    at_peak: dict[Tensor, int] = {}
    ends: dict[int, list[Tensor]] = {}
    for place, node in enumerate(nodes):
        if node.op.layout:
            continue
        if size := scratch(node):
            mine.scratch[node] = (arena.take(size), size)
        over = {} if naive else _take_over(node, place, dies, alive)
        for output in node.outputs:
            if output in pinned or output.index in node.aliases:
                continue
            if output.index in over:
                source = over[output.index]
                mine.offsets[output] = mine.offsets[source]
                del alive[source]
                mine.taken_over += 1
            else:
                mine.offsets[output] = arena.take(output.nbytes)
            alive[output] = output.nbytes
            mine.without_reuse += aligned(output.nbytes)
            ends.setdefault(max(dies.get(output, place), place), []).append(output)
        mine.without_reuse += aligned(size)
        if arena.top > mine.arena:
            mine.arena, mine.peak_at = arena.top, node
            at_peak = dict(alive)
        if naive:
            continue
        if size:
            arena.give(*mine.scratch[node])
        for tensor in ends.pop(place, ()):
            if tensor in alive:
                arena.give(mine.offsets[tensor], alive.pop(tensor))
    mine.alive_at_peak = sorted(((repr(tensor), size) for tensor, size in at_peak.items()), key=lambda entry: -entry[1])
    return mine


def _last_uses(nodes: Sequence[Node], outputs: Iterable[Tensor]) -> dict[Tensor, int]:
    """For each tensor that owns memory, the place of its last reader; outputs are read after the end."""
    dies = {owner_of(source): place for place, node in enumerate(nodes) if not node.op.layout for source in node.sources}
    return dies | {owner_of(output): len(nodes) for output in outputs}


def _take_over(node: Node, place: int, dies: dict[Tensor, int], alive: dict[Tensor, int]) -> dict[int, Tensor]:
    """Which outputs may lie where a source lies: the source ends here, fills its memory, and is not taken already."""
    over: dict[int, Tensor] = {}
    for index, number in node.op.in_place:
        if index >= len(node.outputs) or index in over or index in node.aliases:
            continue
        output, source = node.outputs[index], owner_of(node.sources[number])
        # whoever else reads that memory here may read it after it was written over
        alone = sum(owner_of(each) is source for each in node.sources) == 1
        same = alone and output.shape == node.sources[number].shape and output.nbytes == source.nbytes
        if same and source in alive and dies.get(source) == place and source not in over.values():
            over[index] = source
    return over
