"""The order in which weights of a mapped file are read ahead of the computation."""

from collections.abc import Mapping, Sequence

from llamatrain.graph.ops import get_rows
from llamatrain.graph.tensor import I32, Node, Tensor

AHEAD_BYTES = 64 << 20  # of weights that are requested before they are needed


def find_weight(node: Node) -> Tensor | None:
    """Return the weight that a product reads, or None. Rows of an embedding are few, and are not read ahead."""
    index = node.op.quantized_source
    if index is None or node.op is get_rows:
        return None
    weight = node.sources[index]
    return None if weight.node or len(weight.shape) < 2 else weight


def find_ends(node: Node) -> Tensor | None:
    """Return the numbers that say which experts have choices, of a product with experts."""
    return node.sources[3] if node.op.name.startswith("expert_") else None


def order_reads(nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """Return the products whose weights are requested before each product runs.

    They are the next ones, as long as AHEAD_BYTES are not exceeded, and as the numbers that say which experts are
    read have been computed; and a product's own weight, if it has not been requested before.
    """
    place = {node: index for index, node in enumerate(nodes)}
    sizes = {node: weight.nbytes for node in nodes if (weight := find_weight(node))}
    readers, order, end = list(sizes), dict[Node, list[Node]](), 0
    for index, reader in enumerate(readers):
        start, ahead = end, sum(sizes[each] for each in readers[index + 1 : end])
        while end < len(readers) and (
            end == index
            or (ahead + sizes[readers[end]] <= AHEAD_BYTES and is_known(readers[end], place, place[reader]))
        ):
            ahead += sizes[readers[end]] if end > index else 0
            end += 1
        order[reader] = readers[start:end]
    return order


def is_known(node: Node, place: Mapping[Node, int], now: int) -> bool:
    """Return True if the integers that a node reads have been computed before another node runs."""
    makers = [source.node for source in node.sources if source.dtype is I32 and source.node]
    return all(place.get(each, -1) < now for each in makers)
