"""The graph allocator: from an order of nodes to places in one arena, before there is any memory.

First it is settled when each value lives: from its making to its last reader; an op may take over the memory of a source that
dies with it; views and changes in place follow their owner; leaves, and values that are pinned to memory of the caller's, are
left alone; scratch memory of a kernel lives as long as its call. Then, with all lives known, places are given.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

from llamatrain.engine.allocator import LIMITLESS, Allocation, aligned, loads_of, placed
from llamatrain.engine.schedule import make_contiguous, ordered, owner_of
from llamatrain.errors import GraphError, MemoryPlanError
from llamatrain.graph.dynamic_axis import cuts
from llamatrain.graph.ops import cont
from llamatrain.graph.printing import described, verify
from llamatrain.graph.tensor import Node, QuantizedType, Tensor, leaves_of
from llamatrain.platform.memory import ALIGNMENT

Scratch = Callable[[Node], int]  # bytes that a node's kernel needs beside its outputs
Resident = Callable[
    [Iterable[int]], int
]  # of weights of such sizes that are only read: bytes in memory at once


@dataclass
class Plan:
    """Where every value lies, and what that costs."""

    outputs: dict[Tensor, Tensor]  # as asked for: as laid out
    nodes: list[Node]
    offsets: dict[Tensor, int]  # of the tensors that own memory in the arena
    scratch: dict[Node, tuple[int, int]]  # offset and size
    arenas: list[int]  # bytes of each; usually there is one
    without_reuse: int
    pinned: frozenset[Tensor]
    peak_at: Node | None = None
    alive_at_peak: list[tuple[str, int]] = field(default_factory=list)
    taken_over: int = 0  # values that lie where one of their sources lay
    most: int = LIMITLESS  # bytes of an arena; the next one's begin at a multiple of them
    base_bytes: int = (
        0  # of quantised weights, which stay in their file: pages that are resident while they are read
    )

    @property
    def arena(self) -> int:
        return sum(self.arenas)

    def leaves(self, role: str) -> list[Tensor]:
        return [leaf for leaf in leaves_of(self.outputs.values()) if leaf.role == role]

    def bytes(self, role: str) -> int:
        """Of the leaves of a role; without weights that stay in their file."""
        return sum(leaf.nbytes for leaf in self.leaves(role) if not isinstance(leaf.dtype, QuantizedType))

    @property
    def pinned_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.pinned)

    @property
    def total(self) -> int:
        """All that will be resident, pages of the base's file too."""
        own = self.arena + self.pinned_bytes + self.base_bytes
        return own + sum(self.bytes(role) for role in ("input", "parameter", "state"))

    def report(self, most: int = 8) -> str:
        """What a run will take, in words."""
        kinds = [(role, self.bytes(role)) for role in ("parameter", "state", "input")]
        kinds += [("base", self.base_bytes), ("pinned", self.pinned_bytes), ("arena", self.arena)]
        lines = [f"{name:12} {size:>18,} bytes" for name, size in kinds]
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
    scratch: Scratch = lambda node: 0,
    resident: Resident = sum,
    naive: bool = False,
    most: int = LIMITLESS,
    order: Sequence[Tensor] = (),
) -> Plan:
    """Lay the graph out. Of the two evaluation orders the one with the lower peak is taken; or values are made in the `order`
    of the caller, and those that it leaves out before their first reader.

    No arena is larger than `most` bytes, for a backend that cannot give all in one block: then there are several.

    `pinned` are outputs that the caller holds memory for. A naive plan gives each value memory of its own: where it gives other
    results than the usual one, the planner is wrong, not a kernel. `scratch` and `resident` are what its backend says of kernels
    and of quantised weights.
    """
    asked, pinned = list(dict.fromkeys(outputs)), set(pinned)
    own = [
        cont(output) if output in pinned and owner_of(output) is not output else output for output in asked
    ]
    contiguous = make_contiguous([*own, *order])
    laid, order = dict(zip(asked, contiguous, strict=False)), contiguous[len(own) :]
    pins = frozenset(laid[tensor] for tensor in pinned)
    verify(laid.values())
    scratch = cache(partial(_most_scratch, scratch))
    ways = (True,) if order else (True, False)
    candidates = (ordered(list(laid.values()), left_to_right, order) for left_to_right in ways)
    best = min(
        (_lay_out(nodes, laid, pins, scratch, naive, most) for nodes in candidates),
        key=lambda each: each.arena,
    )
    best.base_bytes = resident(
        leaf.nbytes for leaf in best.leaves("state") if isinstance(leaf.dtype, QuantizedType)
    )
    return best


def _most_scratch(scratch: Scratch, node: Node) -> int:
    """In whatever length it is run."""
    return max(map(scratch, cuts(node)))


@dataclass
class _Lifetimes:
    """When there is what, before anything has a place."""

    dies: dict[Tensor, int]
    blocks: list[Allocation] = field(default_factory=list)
    lies_in: dict[Tensor, Allocation] = field(default_factory=dict)  # tensors that own memory in the arena
    needs: dict[Node, Allocation] = field(default_factory=dict)
    taken_over: int = 0


def _lives_of(
    nodes: Sequence[Node], outputs: Iterable[Tensor], pinned: frozenset[Tensor], scratch: Scratch, naive: bool
) -> _Lifetimes:
    lives = _Lifetimes(last_uses(nodes, outputs))
    for place, node in enumerate(nodes):
        if node.op.layout:
            continue
        if size := scratch(node):
            life = (0, len(nodes)) if naive else (place, place)
            lives.blocks.append(lives.needs.setdefault(node, Allocation(size, *life)))
        over = {} if naive else _take_over(node, place, lives.dies, lives.lies_in)
        for output in node.outputs:
            if output in pinned or output.index in node.aliases:
                continue
            ends = len(nodes) if naive else max(lives.dies.get(output, place), place)
            if output.index in over:
                lives.lies_in[output] = lives.lies_in[over[output.index]]
                lives.lies_in[output].last = ends
                lives.taken_over += 1
            else:
                lives.blocks.append(
                    lives.lies_in.setdefault(output, Allocation(output.nbytes, 0 if naive else place, ends))
                )
    return lives


def _lay_out(
    nodes: Sequence[Node],
    outputs: dict[Tensor, Tensor],
    pinned: frozenset[Tensor],
    scratch: Scratch,
    naive: bool,
    most: int,
) -> Plan:
    lives = _lives_of(nodes, outputs.values(), pinned, scratch, naive)
    _check_sizes(lives, most)
    offsets, arenas = placed(lives.blocks, most)
    at = {id(block): offset for block, offset in zip(lives.blocks, offsets, strict=True)}
    own = sum(aligned(tensor.nbytes) for tensor in lives.lies_in)
    mine = Plan(
        outputs=outputs,
        nodes=list(nodes),
        offsets={tensor: at[id(block)] for tensor, block in lives.lies_in.items()},
        scratch={node: (at[id(block)], block.size) for node, block in lives.needs.items()},
        arenas=arenas,
        without_reuse=own + sum(aligned(block.size) for block in lives.needs.values()),
        pinned=pinned,
        taken_over=lives.taken_over,
        most=most,
    )
    _note_peak(mine, lives, offsets)
    return mine


def _check_sizes(lives: _Lifetimes, most: int) -> None:
    if most < ALIGNMENT or most % ALIGNMENT:
        raise GraphError(f"an arena of {most:,} bytes cannot be: it takes a multiple of {ALIGNMENT}")
    for what, block in (*lives.lies_in.items(), *lives.needs.items()):
        if aligned(block.size) > most:
            told = described(what) if isinstance(what, Tensor) else f"what the kernel of {what!r} needs"
            raise MemoryPlanError(f"{told} takes {block.size:,} bytes, and an arena has {most:,} at most")


def _note_peak(mine: Plan, lives: _Lifetimes, offsets: Sequence[int]) -> None:
    """When the arena is used to its top, and most of it; and by what."""
    ends = [offset + aligned(each.size) for each, offset in zip(lives.blocks, offsets, strict=True)]
    top = max(ends, default=0)
    if not top:
        return
    tops = [each for each, end in zip(lives.blocks, ends, strict=True) if end == top]
    alive, end = loads_of(lives.blocks), len(mine.nodes) - 1
    place = max(
        (each for top in tops for each in range(top.first, min(top.last, end) + 1)),
        key=lambda each: alive[each],
    )
    mine.peak_at = mine.nodes[place]
    places = {node: number for number, node in enumerate(mine.nodes)}
    there = [
        t
        for t in mine.offsets
        if t.node and places[t.node] <= place <= max(lives.dies.get(t, 0), places[t.node])
    ]
    mine.alive_at_peak = sorted(
        ((repr(tensor), tensor.nbytes) for tensor in there), key=lambda entry: -entry[1]
    )


def last_uses(nodes: Sequence[Node], outputs: Iterable[Tensor]) -> dict[Tensor, int]:
    """For each tensor that owns memory, the place of its last reader; outputs are read after the end."""
    dies = {
        owner_of(source): place
        for place, node in enumerate(nodes)
        if not node.op.layout
        for source in node.sources
    }
    return dies | {owner_of(output): len(nodes) for output in outputs}


def _take_over(
    node: Node, place: int, dies: dict[Tensor, int], lies_in: dict[Tensor, Allocation]
) -> dict[int, Tensor]:
    """Which outputs may lie where a source lies: the source ends here, fills its memory, and is not taken already."""
    over: dict[int, Tensor] = {}
    for index, number in node.op.in_place:
        if index >= len(node.outputs) or index in over or index in node.aliases:
            continue
        output, source = node.outputs[index], owner_of(node.sources[number])
        # whoever else reads that memory here may read it after it was written over
        alone = sum(owner_of(each) is source for each in node.sources) == 1
        same = alone and output.shape == node.sources[number].shape and output.nbytes == source.nbytes
        if same and source in lies_in and dies.get(source) == place and source not in over.values():
            over[index] = source
    return over
