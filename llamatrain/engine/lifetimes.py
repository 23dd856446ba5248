"""Lists what lies in a plan's arena, when and where, for display."""

from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

from llamatrain.engine.plan import Plan, last_uses
from llamatrain.engine.schedule import find_owner
from llamatrain.graph.node_roles import NodeRole, find_roles
from llamatrain.graph.printing import describe
from llamatrain.graph.tensor import Node, Tensor

Kind = Literal["forward", "kept", "again", "backward", "gradient", "optimizer", "scratch"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Lifetime(NamedTuple):
    """A value in the arena, from the call that writes it to the last one that reads it.

    It ends earlier if another value reuses its memory.
    """

    kind: Kind
    name: str
    first: int
    last: int
    offset: int
    size: int


def list_lifetimes(plan: Plan) -> Iterator[Lifetime]:
    """Yield the lifetime of each value and of each scratch buffer."""
    outputs = list(plan.outputs.values())
    roles, last_reads, end = find_roles(outputs), last_uses(plan.nodes, outputs), len(plan.nodes) - 1
    positions = {node: position for position, node in enumerate(plan.nodes)}
    read_by_backward = {
        find_owner(source) for node in plan.nodes if roles[node] != "forward" for source in node.sources
    }
    gradients = {find_owner(output) for output in outputs[1:]}  # the first is the loss
    starts = {(offset, positions[tensor.node]) for tensor, offset in plan.offsets.items() if tensor.node}
    for tensor, offset in plan.offsets.items():
        if (node := tensor.node) is None:
            continue
        first = positions[node]
        last = min(max(last_reads.get(tensor, first), first), end)
        last -= last > first and (offset, last) in starts
        yield Lifetime(
            _classify(tensor, roles[node], read_by_backward, gradients),
            describe(tensor),
            first,
            last,
            offset,
            tensor.nbytes,
        )
    for node, (offset, size) in plan.scratch.items():
        yield Lifetime(
            "scratch", f"scratch of {_describe_node(node)}", positions[node], positions[node], offset, size
        )


def find_peak(plan: Plan) -> tuple[int, str] | None:
    """Return the index and description of the call at which the arena is fullest."""
    return (plan.nodes.index(plan.peak_at), _describe_node(plan.peak_at)) if plan.peak_at else None


def _classify(tensor: Tensor, role: NodeRole, read_by_backward: set[Tensor], gradients: set[Tensor]) -> Kind:
    if role == "forward":
        return "kept" if tensor in read_by_backward else "forward"
    return "gradient" if role == "backward" and tensor in gradients else role


def _describe_node(node: Node) -> str:
    return f"{node.op.name} for {node.outputs[0].name}" if node.outputs[0].name else node.op.name
