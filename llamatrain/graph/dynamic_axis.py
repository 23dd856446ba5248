"""Axes with a length that varies between runs: the graph is planned for the maximum, and nodes are resized.

Only a first axis may vary, and only one in a graph. That it varies follows its length: a shape rule that
passes on a source's length passes that on as well, and one that computes with it does not.
"""

from collections.abc import Iterable, Iterator
from math import ceil

from llamatrain.errors import GraphError
from llamatrain.graph.tensor import DynamicDim, Node, Spec, Tensor


def find_dynamic_dim(tensors: Iterable[Tensor]) -> DynamicDim | None:
    """Return the dynamic axis of the tensors, or None."""
    dims = {tensor.shape[0] for tensor in tensors if tensor.shape and isinstance(tensor.shape[0], DynamicDim)}
    if len(dims) > 1:
        raise GraphError(
            f"only one axis may be dynamic, with one maximum (got {', '.join(map(str, sorted(dims)))})",
            code="several-dynamic-axes",
        )
    return next(iter(dims), None)


def node_dynamic_dim(node: Node) -> DynamicDim | None:
    """Return the dynamic axis of a node, or None."""
    return find_dynamic_dim((*node.sources, *node.outputs))


def round_up(dim: DynamicDim, count: int) -> int:
    """Round a count up to a possible length of the axis."""
    return min(int(dim), max(1, ceil(count / dim.step)) * dim.step)


def resize_node(node: Node, count: int) -> Node:
    """Return the node with `count` rows."""
    result = node.with_sources(tuple(resize_tensor(source, count) for source in node.sources))
    if [output.spec for output in result.outputs] != [
        resize_tensor(output, count).spec for output in node.outputs
    ]:
        raise GraphError(
            f"{node!r} does not keep the dynamic axis with {count} rows of {node_dynamic_dim(node)}",
            code="lost-dynamic-axis",
        )
    return result


def node_sizes(node: Node) -> Iterator[Node]:
    """Yield the node in every possible length."""
    yield node
    if dim := node_dynamic_dim(node):
        yield from (resize_node(node, count) for count in range(dim.step, dim, dim.step))


def resize_tensor(tensor: Tensor, count: int) -> Tensor:
    """Return a tensor with `count` rows if it has the dynamic axis, else the tensor itself."""
    varying = tensor.shape and isinstance(tensor.shape[0], DynamicDim)
    return Tensor(Spec((count, *tensor.shape[1:]), tensor.dtype), tensor.role) if varying else tensor
