"""What lies in a plan's arena, when and where: for whoever wants to see it."""

from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

from llamatrain.engine.plan import Plan, last_uses
from llamatrain.engine.schedule import owner_of
from llamatrain.graph.node_roles import Part, parts_of
from llamatrain.graph.printing import described
from llamatrain.graph.tensor import Node, Tensor

Kind = Literal["forward", "kept", "again", "backward", "gradient", "optimizer", "scratch"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Lifetime(NamedTuple):
    """Memory from the call that fills it to the last one that reads it, or before the one that takes it over."""

    kind: Kind
    name: str
    first: int
    last: int
    offset: int
    size: int


def lives_of(plan: Plan) -> Iterator[Lifetime]:
    outputs = list(plan.outputs.values())
    parts, dies, end = parts_of(outputs), last_uses(plan.nodes, outputs), len(plan.nodes) - 1
    places = {node: place for place, node in enumerate(plan.nodes)}
    later = {owner_of(source) for node in plan.nodes if parts[node] != "forward" for source in node.sources}
    given = {owner_of(output) for output in outputs[1:]}  # the first is the loss
    taken = {(offset, places[tensor.node]) for tensor, offset in plan.offsets.items() if tensor.node}
    for tensor, offset in plan.offsets.items():
        if (node := tensor.node) is None:
            continue
        first = places[node]
        last = min(max(dies.get(tensor, first), first), end)
        last -= last > first and (offset, last) in taken
        yield Lifetime(
            _kind_of(tensor, parts[node], later, given), described(tensor), first, last, offset, tensor.nbytes
        )
    for node, (offset, size) in plan.scratch.items():
        yield Lifetime("scratch", f"scratch of {_named(node)}", places[node], places[node], offset, size)


def peak_of(plan: Plan) -> tuple[int, str] | None:
    """The call at which the arena is fullest, and what it is."""
    return (plan.nodes.index(plan.peak_at), _named(plan.peak_at)) if plan.peak_at else None


def _kind_of(tensor: Tensor, part: Part, later: set[Tensor], given: set[Tensor]) -> Kind:
    if part == "forward":
        return "kept" if tensor in later else "forward"
    return "gradient" if part == "backward" and tensor in given else part


def _named(node: Node) -> str:
    return f"{node.op.name} for {node.outputs[0].name}" if node.outputs[0].name else node.op.name
