"""Axes that are as long as a run needs them: the graph is laid out for the most, and a node cut short for how many there are.

Only a first axis may vary, and only one of a graph. That it varies goes the way of its length: a shape rule that hands on the
length of a source hands on that, and one that computes with it does not.
"""

from collections.abc import Iterable, Iterator
from math import ceil

from llamatrain.errors import GraphError
from llamatrain.graph.tensor import DynamicDim, Node, Spec, Tensor


def most_of(tensors: Iterable[Tensor]) -> DynamicDim | None:
    """How long that axis is at most, where one of these has it."""
    found = {
        tensor.shape[0] for tensor in tensors if tensor.shape and isinstance(tensor.shape[0], DynamicDim)
    }
    if len(found) > 1:
        raise GraphError(f"one axis may vary, not several of at most {', '.join(map(str, sorted(found)))}")
    return next(iter(found), None)


def varies(node: Node) -> DynamicDim | None:
    return most_of((*node.sources, *node.outputs))


def whole(most: DynamicDim, count: int) -> int:
    """Of so many the next that can be."""
    return min(int(most), max(1, ceil(count / most.step)) * most.step)


def cut(node: Node, count: int) -> Node:
    """The same of fewer rows."""
    made = Node(node.op, tuple(shorter(source, count) for source in node.sources), node.attrs)
    if [output.spec for output in made.outputs] != [shorter(output, count).spec for output in node.outputs]:
        raise GraphError(f"{node!r} does not go on with {count} rows of {varies(node)}")
    return made


def cuts(node: Node) -> Iterator[Node]:
    """As it is, and in every other length."""
    yield node
    if most := varies(node):
        yield from (cut(node, count) for count in range(most.step, most, most.step))


def shorter(tensor: Tensor, count: int) -> Tensor:
    """One of so many rows, if it varies."""
    varying = tensor.shape and isinstance(tensor.shape[0], DynamicDim)
    return Tensor(Spec((count, *tensor.shape[1:]), tensor.dtype), tensor.role) if varying else tensor
