"""The memory planner: from an order of nodes to offsets in an arena, before any memory exists.

First the lifetime of each value is computed: from its node to its last reader. An op may reuse the memory of
a source that dies with it; views and in-place changes belong to their owner; leaves, and outputs pinned to
the caller's memory, are not planned; a kernel's scratch memory lives as long as its call. Then the allocator
assigns offsets.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

from llamatrain.engine.allocator import UNLIMITED, Allocation, align, assign_offsets, memory_profile
from llamatrain.engine.schedule import find_owner, make_contiguous, order_nodes
from llamatrain.errors import GraphError, MemoryPlanError
from llamatrain.graph.dynamic_axis import node_sizes
from llamatrain.graph.ops import cont
from llamatrain.graph.printing import describe, verify
from llamatrain.graph.tensor import Node, QuantizedType, Tensor, collect_leaves
from llamatrain.platform.memory import ALIGNMENT

Scratch = Callable[[Node], int]  # bytes that a node's kernel needs besides its outputs
Rewrite = Callable[[Sequence[Tensor]], list[Tensor]]
Resident = Callable[[Iterable[int]], int]  # resident bytes of read-only weights of these sizes


@dataclass
class Plan:
    """The offset of every value, and what the plan costs."""

    outputs: dict[Tensor, Tensor]  # requested output: contiguous output
    nodes: list[Node]
    offsets: dict[Tensor, int]  # of the tensors that own memory in the arena
    scratch: dict[Node, tuple[int, int]]  # offset and size
    arenas: list[int]  # bytes of each; usually there is one
    without_reuse: int
    pinned: frozenset[Tensor]
    peak_at: Node | None = None
    alive_at_peak: list[tuple[str, int]] = field(default_factory=list)
    reused: int = 0  # the number of values that reuse a source's memory
    max_arena: int = UNLIMITED  # the most bytes of an arena; arena i starts at i times this
    base_bytes: int = 0  # bytes of quantized weights that are resident while they are read from their file

    @property
    def arena(self) -> int:
        """The bytes of all arenas."""
        return sum(self.arenas)

    def leaves(self, role: str) -> list[Tensor]:
        """Return the leaves of a role."""
        return [leaf for leaf in collect_leaves(self.outputs.values()) if leaf.role == role]

    def role_bytes(self, role: str) -> int:
        """Return the bytes of the leaves of a role, without quantized weights, which stay in their file."""
        return sum(leaf.nbytes for leaf in self.leaves(role) if not isinstance(leaf.dtype, QuantizedType))

    @property
    def pinned_bytes(self) -> int:
        """The bytes of pinned outputs."""
        return sum(tensor.nbytes for tensor in self.pinned)

    @property
    def total(self) -> int:
        """The resident bytes of a run, including pages of the base's file."""
        own = self.arena + self.pinned_bytes + self.base_bytes
        return own + sum(self.role_bytes(role) for role in ("input", "parameter", "state"))

    def report(self, max_lines: int = 8) -> str:
        """Return a table of the memory that a run needs."""
        kinds = [(role, self.role_bytes(role)) for role in ("parameter", "state", "input")]
        kinds += [("base", self.base_bytes), ("pinned", self.pinned_bytes), ("arena", self.arena)]
        lines = [f"{name:12} {size:>18,} bytes" for name, size in kinds]
        lines.append(f"{'total':12} {self.total:>18,} bytes")
        saved = 1 - self.arena / self.without_reuse if self.without_reuse else 0.0
        lines.append(f"without reuse the arena would take {self.without_reuse:,} bytes: {saved:.0%} saved")
        if self.peak_at:
            lines.append(f"the arena is fullest at {self.peak_at!r}, when it holds")
            lines += [f"  {size:>16,}  {name}" for name, size in self.alive_at_peak[:max_lines]]
        return "\n".join(lines)


def plan(
    outputs: Iterable[Tensor],
    *,
    pinned: Iterable[Tensor] = (),
    scratch: Scratch = lambda node: 0,
    resident: Resident = sum,
    rewrite: Rewrite = list,
    naive: bool = False,
    max_arena: int = UNLIMITED,
    order: Sequence[Tensor] = (),
) -> Plan:
    """Plan the memory of a graph.

    Of two evaluation orders, the one with the lower peak is used. With `order`, these values are computed in
    this order, and others before their first reader.

    No arena exceeds `max_arena` bytes, for a device that limits allocations; then there may be several.
    `pinned` outputs lie in the caller's memory. With `naive`, each value has its own memory: if results
    differ from those of a normal plan, the planner is wrong, not a kernel. `scratch`, `resident` and `rewrite`
    are the device's rules for kernels, for quantized weights and for nodes that it computes together.
    """
    requested, pinned = list(dict.fromkeys(outputs)), set(pinned)
    dense = [
        cont(output) if output in pinned and find_owner(output) is not output else output
        for output in requested
    ]
    contiguous = rewrite(make_contiguous([*dense, *order]))
    laid_out, order = dict(zip(requested, contiguous, strict=False)), contiguous[len(dense) :]
    pins = frozenset(laid_out[tensor] for tensor in pinned)
    verify(laid_out.values())
    scratch = cache(partial(_max_scratch, scratch))
    directions = (True,) if order else (True, False)
    orders = [
        _compute_lifetimes(
            order_nodes(list(laid_out.values()), left_to_right, order),
            laid_out.values(),
            pins,
            scratch,
            naive,
        )
        for left_to_right in directions
    ]
    best = _lay_out_best(orders, lambda lives: _lay_out(lives, laid_out, pins, max_arena))
    best.base_bytes = resident(
        leaf.nbytes for leaf in best.leaves("state") if isinstance(leaf.dtype, QuantizedType)
    )
    return best


def _lay_out_best(orders: Sequence["_Lifetimes"], lay_out: Callable[["_Lifetimes"], Plan]) -> Plan:
    """Return the plan with the smallest arena, the first of equal ones.

    No arena is smaller than the memory that is live at a time. An order is not laid out if this shows that
    another one is at least as good.
    """
    least = [int(memory_profile(lives.blocks).max()) for lives in orders]
    plans: dict[int, Plan] = {}
    for number in sorted(range(len(orders)), key=least.__getitem__):
        if not any((plan.arena, other) < (least[number], number) for other, plan in plans.items()):
            plans[number] = lay_out(orders[number])
    return min(plans.items(), key=lambda item: (item[1].arena, item[0]))[1]


def _max_scratch(scratch: Scratch, node: Node) -> int:
    """Return the largest scratch size over all lengths of a node's dynamic axis."""
    return max(map(scratch, node_sizes(node)))


@dataclass
class _Lifetimes:
    """The lifetimes of values in an order of nodes, before they have offsets."""

    nodes: Sequence[Node]
    last_reads: dict[Tensor, int]
    blocks: list[Allocation] = field(default_factory=list)
    # tensors that own memory in the arena
    allocations: dict[Tensor, Allocation] = field(default_factory=dict)
    scratch: dict[Node, Allocation] = field(default_factory=dict)
    reused: int = 0


def _compute_lifetimes(
    nodes: Sequence[Node], outputs: Iterable[Tensor], pinned: frozenset[Tensor], scratch: Scratch, naive: bool
) -> _Lifetimes:
    lives = _Lifetimes(nodes, last_uses(nodes, outputs))
    for position, node in enumerate(nodes):
        if node.op.layout:
            continue
        if size := scratch(node):
            life = (0, len(nodes)) if naive else (position, position)
            lives.blocks.append(lives.scratch.setdefault(node, Allocation(size, *life)))
        reusable = {} if naive else _find_reuse(node, position, lives.last_reads, lives.allocations)
        for output in node.outputs:
            if output in pinned or output.index in node.aliases:
                continue
            last = len(nodes) if naive else max(lives.last_reads.get(output, position), position)
            if output.index in reusable:
                lives.allocations[output] = lives.allocations[reusable[output.index]]
                lives.allocations[output].last = last
                lives.reused += 1
            else:
                lives.blocks.append(
                    lives.allocations.setdefault(
                        output, Allocation(output.nbytes, 0 if naive else position, last)
                    )
                )
    return lives


def _lay_out(
    lives: _Lifetimes, outputs: dict[Tensor, Tensor], pinned: frozenset[Tensor], max_arena: int
) -> Plan:
    _check_sizes(lives, max_arena)
    offsets, arenas = assign_offsets(lives.blocks, max_arena)
    offset_by_block = {id(block): offset for block, offset in zip(lives.blocks, offsets, strict=True)}
    unshared = sum(align(tensor.nbytes) for tensor in lives.allocations)
    result = Plan(
        outputs=outputs,
        nodes=list(lives.nodes),
        offsets={tensor: offset_by_block[id(block)] for tensor, block in lives.allocations.items()},
        scratch={node: (offset_by_block[id(block)], block.size) for node, block in lives.scratch.items()},
        arenas=arenas,
        without_reuse=unshared + sum(align(block.size) for block in lives.scratch.values()),
        pinned=pinned,
        reused=lives.reused,
        max_arena=max_arena,
    )
    _record_peak(result, lives, offsets)
    return result


def _check_sizes(lives: _Lifetimes, max_arena: int) -> None:
    if max_arena < ALIGNMENT or max_arena % ALIGNMENT:
        raise GraphError(
            f"the size of an arena must be a multiple of {ALIGNMENT} bytes (got {max_arena:,})",
            code="invalid-arena",
        )
    for owner, block in (*lives.allocations.items(), *lives.scratch.items()):
        if align(block.size) > max_arena:
            description = (
                describe(owner) if isinstance(owner, Tensor) else f"what the kernel of {owner!r} needs"
            )
            raise MemoryPlanError(
                f"{description} needs {block.size:,} bytes, but an arena has at most {max_arena:,}",
                code="arena-too-small",
            )


def _record_peak(result: Plan, lives: _Lifetimes, offsets: Sequence[int]) -> None:
    """Record the node at which the arena is full to its top and most is live, and the live values."""
    ends = [offset + align(each.size) for each, offset in zip(lives.blocks, offsets, strict=True)]
    top = max(ends, default=0)
    if not top:
        return
    tops = [each for each, end in zip(lives.blocks, ends, strict=True) if end == top]
    alive, end = memory_profile(lives.blocks), len(result.nodes) - 1
    position = max(
        (each for top in tops for each in range(top.first, min(top.last, end) + 1)),
        key=lambda each: alive[each],
    )
    result.peak_at = result.nodes[position]
    positions = {node: index for index, node in enumerate(result.nodes)}
    live = [
        t
        for t in result.offsets
        if t.node and positions[t.node] <= position <= max(lives.last_reads.get(t, 0), positions[t.node])
    ]
    result.alive_at_peak = sorted(
        ((repr(tensor), tensor.nbytes) for tensor in live), key=lambda entry: -entry[1]
    )


def last_uses(nodes: Sequence[Node], outputs: Iterable[Tensor]) -> dict[Tensor, int]:
    """Return the index of the last reader of each tensor that owns memory; outputs are read at the end."""
    last_reads = {
        find_owner(source): position
        for position, node in enumerate(nodes)
        if not node.op.layout
        for source in node.sources
    }
    return last_reads | {find_owner(output): len(nodes) for output in outputs}


def _find_reuse(
    node: Node, position: int, last_reads: dict[Tensor, int], allocations: dict[Tensor, Allocation]
) -> dict[int, Tensor]:
    """Return the outputs that may reuse a source's memory.

    The source must end here, own all of its memory, have the same size, and be read by nothing else in this
    node, since another read could come after the first write.
    """
    reusable: dict[int, Tensor] = {}
    for index, number in node.op.in_place:
        if index >= len(node.outputs) or index in reusable or index in node.aliases:
            continue
        output, source = node.outputs[index], find_owner(node.sources[number])
        # another source in the same memory could be read after it is overwritten
        is_only_reader = sum(find_owner(each) is source for each in node.sources) == 1
        fits = (
            is_only_reader and output.shape == node.sources[number].shape and output.nbytes == source.nbytes
        )
        if (
            fits
            and source in allocations
            and last_reads.get(source) == position
            and source not in reusable.values()
        ):
            reusable[index] = source
    return reusable
