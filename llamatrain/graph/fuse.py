"""Fuses sums with the products in them, so that less memory is read and written.

A product that is added to something adds to what is there: an adapter's product to that of its weight, or the
gradients of one tensor by several readers.
"""

from collections import Counter
from collections.abc import Sequence

from llamatrain.graph.ops import (
    add,
    matmul,
    matmul_add,
    matmul_int8,
    matmul_nn,
    matmul_nn_add,
    matmul_nn_int8,
)
from llamatrain.graph.tensor import Node, Op, Tensor, collect_nodes

ADDING: dict[Op, Op] = {matmul: matmul_add, matmul_nn: matmul_nn_add}
PRODUCTS = {matmul, matmul_nn, matmul_int8, matmul_nn_int8}
LARGEST_RANK = 64  # of an adapter whose product pays to be fused on a processor


def count_readers(nodes: Sequence[Node], outputs: Sequence[Tensor]) -> Counter[Tensor]:
    """Return how often each tensor is read, or asked for."""
    return Counter(source for node in nodes for source in node.sources) + Counter(outputs)


# ---- two terms -------------------------------------------------------------


def fuse_adapter_sums(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs of an equal graph in which the products of adapters add to those of their weights.

    Other sums stay as they are. So a model with an adapter that adds nothing gives the bits of one without it.
    """
    nodes = collect_nodes(outputs)
    readers = count_readers(nodes, outputs)
    new: dict[Tensor, Tensor] = {}
    for node in nodes:
        made = node.with_sources(tuple(new.get(source, source) for source in node.sources))
        short = find_short_product(node, readers)
        if short is not None and is_product(made.sources[1 - short]):
            made = add_product(made.sources[short], made.sources[1 - short], node)
        if made is not node:
            new.update(zip(node.outputs, made.outputs, strict=True))
    return [new.get(output, output) for output in outputs]


def find_short_product(node: Node, readers: Counter[Tensor]) -> int | None:
    """Return which term of a sum is a product of few operations that nothing else reads, or None."""
    if not is_sum(node):
        return None
    found = [
        (operations(source), index)
        for index, source in enumerate(node.sources)
        if can_add(source) and readers[source] == 1
    ]
    return min(found)[1] if found and min(found)[0] <= LARGEST_RANK else None


def is_product(tensor: Tensor) -> bool:
    """Return True for a product of matrices."""
    return bool(tensor.node and tensor.node.op in PRODUCTS)


# ---- any number of terms ---------------------------------------------------


def fuse_sums(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs of an equal graph in which the products in a sum add to its other terms.

    The larger a product is, the later it comes: its operations hide the time that it takes to read the others.
    """
    nodes = collect_nodes(outputs)
    readers = count_readers(nodes, outputs)
    new: dict[Tensor, Tensor] = {}
    terms: dict[Tensor, list[Tensor]] = {}  # of sums, and of products that can add; all are read once
    for node in nodes:
        made = node.with_sources(tuple(new.get(source, source) for source in node.sources))
        if is_sum(node):
            parts = [part for source in made.sources for part in terms.get(source, [source])]
            products = sorted((part for part in parts if part in terms), key=operations)
            if products:
                others = [part for part in parts if part not in terms]
                made = join_terms(others or [products.pop(0)], products, node)
            if readers[node.outputs[0]] == 1:
                terms[made.outputs[0]] = parts
        elif readers[node.outputs[0]] == 1 and can_add(made.outputs[0]):
            terms[made.outputs[0]] = [made.outputs[0]]
        if made is not node:
            new.update(zip(node.outputs, made.outputs, strict=True))
    return [new.get(output, output) for output in outputs]


def join_terms(others: Sequence[Tensor], products: Sequence[Tensor], total: Node) -> Node:
    """Return a node that adds up all terms, the products last."""
    tensor = others[0]
    for other in others[1:]:
        tensor = add(tensor, other)
    for product in products:
        tensor = add_product(product, tensor, total).outputs[0]
    if tensor.node is None:
        raise ValueError("a sum needs two terms")
    return tensor.node


# ---- products --------------------------------------------------------------


def is_sum(node: Node) -> bool:
    """Return True for a sum of two terms of one shape and type."""
    return node.op is add and node.sources[0].spec == node.sources[1].spec


def can_add(tensor: Tensor) -> bool:
    """Return True for a product of two matrices without a bias: it can add to something."""
    node = tensor.node
    return bool(node and node.op in ADDING and len(node.sources) == 2 and len(tensor.shape) == 2)


def operations(product: Tensor) -> int:
    """Return the number of operations for an element of a product."""
    assert product.node
    return product.node.sources[0].shape[-1]


def add_product(product: Tensor, other: Tensor, total: Node) -> Node:
    """Return the node that adds a product to something, named after the sum that it replaces."""
    assert product.node
    return Node(ADDING[product.node.op], (other, *product.node.sources), {}, total.outputs[0].name)
