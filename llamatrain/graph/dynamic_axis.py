"""Axes that are as long as a run needs them: the graph is laid out for the most, and a node cut short for how many there are.

Only a first axis may vary, and only one of a graph. That it varies goes the way of its length: a shape rule that hands on the
length of a source hands on that, and one that computes with it does not.
"""

from collections.abc import Iterable, Iterator
from math import ceil

from llamatrain.errors import GraphError
from llamatrain.graph.tensor import DynamicDim, Node, Spec, Tensor


def find_dynamic_dim(tensors: Iterable[Tensor]) -> DynamicDim | None:
    """How long that axis is at most, where one of these has it."""
    dims = {tensor.shape[0] for tensor in tensors if tensor.shape and isinstance(tensor.shape[0], DynamicDim)}
    if len(dims) > 1:
        raise GraphError(f"one axis may vary, not several of at most {', '.join(map(str, sorted(dims)))}")
    return next(iter(dims), None)


def node_dynamic_dim(node: Node) -> DynamicDim | None:
    return find_dynamic_dim((*node.sources, *node.outputs))


def round_up(dim: DynamicDim, count: int) -> int:
    """Of so many the next that can be."""
    return min(int(dim), max(1, ceil(count / dim.step)) * dim.step)


def resize_node(node: Node, count: int) -> Node:
    """The same of fewer rows."""
    result = Node(node.op, tuple(resize_tensor(source, count) for source in node.sources), node.attrs)
    if [output.spec for output in result.outputs] != [
        resize_tensor(output, count).spec for output in node.outputs
    ]:
        raise GraphError(f"{node!r} does not go on with {count} rows of {node_dynamic_dim(node)}")
    return result


def node_sizes(node: Node) -> Iterator[Node]:
    """As it is, and in every other length."""
    yield node
    if dim := node_dynamic_dim(node):
        yield from (resize_node(node, count) for count in range(dim.step, dim, dim.step))


def resize_tensor(tensor: Tensor, count: int) -> Tensor:
    """One of so many rows, if it varies."""
    varying = tensor.shape and isinstance(tensor.shape[0], DynamicDim)
    return Tensor(Spec((count, *tensor.shape[1:]), tensor.dtype), tensor.role) if varying else tensor
