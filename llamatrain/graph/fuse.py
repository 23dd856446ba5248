"""Fuses sums with the products that they add, for devices whose products can add to what is there.

An adapter adds a product to the product of its weight, and gradients of one tensor by several readers are added
up: as nodes of their own, such sums would read and write everything once more.
"""

from collections import Counter
from collections.abc import Sequence

from llamatrain.graph.ops import add, matmul, matmul_add, matmul_nn, matmul_nn_add
from llamatrain.graph.tensor import Node, Op, Tensor, collect_nodes

ADDING: dict[Op, Op] = {matmul: matmul_add, matmul_nn: matmul_nn_add}


def fuse_sums(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs with products that add to another value instead of being added to it."""
    nodes = collect_nodes(outputs)
    readers = Counter(source for node in nodes for source in node.sources) + Counter(outputs)
    new: dict[Tensor, Tensor] = {}
    for node in nodes:
        sources = tuple(new.get(source, source) for source in node.sources)
        index = find_product(node, readers)
        if index is not None and (product := sources[index].node):
            value = sources[1 - index]
            made = Node(ADDING[product.op], (value, *product.sources), {}, node.outputs[0].name)
        elif sources != node.sources:
            made = Node(node.op, sources, node.attrs, node.outputs[0].name)
        else:
            continue
        new.update(zip(node.outputs, made.outputs, strict=True))
    return [new.get(output, output) for output in outputs]


def find_product(node: Node, readers: Counter[Tensor]) -> int | None:
    """Return which source of a sum is a product that nothing else reads, or None.

    Of two, it is the one with the fewest operations.
    """
    if node.op is not add or node.sources[0].spec != node.sources[1].spec:
        return None
    found = [
        (source.node.sources[0].shape[-1], index)
        for index, source in enumerate(node.sources)
        if source.node and is_plain_product(source.node) and readers[source] == 1
    ]
    return min(found)[1] if found else None


def is_plain_product(node: Node) -> bool:
    """Return True for a product of two matrices without a bias."""
    return node.op in ADDING and len(node.sources) == 2 and len(node.outputs[0].shape) == 2
