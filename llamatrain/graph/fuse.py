"""Fuses nodes, so that less memory is read and written.

A product that is added to something adds to what is there: an adapter's product to that of its weight, or the
gradients of one tensor by several readers. What is only read in bf16 is written in bf16.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from llamatrain.graph.ops import (
    add,
    cast,
    matmul,
    matmul_add,
    matmul_int8,
    matmul_nn,
    matmul_nn_add,
    matmul_nn_int8,
    rms_norm,
    rms_norm_half,
    rope,
    rope_half,
)
from llamatrain.graph.tensor import BF16, F32, Node, Op, Tensor, collect_nodes

ADDING: dict[Op, Op] = {matmul: matmul_add, matmul_nn: matmul_nn_add}
PRODUCTS = {matmul, matmul_nn, matmul_int8, matmul_nn_int8}
LARGEST_RANK = 64  # of an adapter whose product pays to be fused on a processor
HALVED: dict[Op, Op] = {rms_norm: rms_norm_half, rope: rope_half}

# A node, its sources in the new graph, and how often each old tensor is read -> the node to use, or None.
Rule = Callable[[Node, Sequence[Tensor], Counter[Tensor]], Node | None]


def fuse(outputs: Sequence[Tensor], *rules: Rule) -> list[Tensor]:
    """Return the outputs of an equal graph in which the first rule that fits changed each node."""
    nodes = collect_nodes(outputs)
    readers = Counter(source for node in nodes for source in node.sources) + Counter(outputs)
    new: dict[Tensor, Tensor] = {}
    for node in nodes:
        sources = tuple(new.get(source, source) for source in node.sources)
        made = next((made for rule in rules if (made := rule(node, sources, readers))), None)
        if made is None and sources != node.sources:
            made = Node(node.op, sources, node.attrs, node.outputs[0].name)
        if made:
            new.update(zip(node.outputs, made.outputs, strict=True))
    return [new.get(output, output) for output in outputs]


def fuse_sum(node: Node, sources: Sequence[Tensor], readers: Counter[Tensor]) -> Node | None:
    """Return a product that adds to the other source of a sum, if one of them is such a product."""
    index = find_product(node, readers)
    product = sources[index].node if index is not None else None
    if index is None or product is None:
        return None
    return Node(ADDING[product.op], (sources[1 - index], *product.sources), {}, node.outputs[0].name)


def fuse_adapter_sum(node: Node, sources: Sequence[Tensor], readers: Counter[Tensor]) -> Node | None:
    """Return a product with a short sum that adds to another product, as an adapter's does.

    Other sums stay as they are. So a model with an adapter that adds nothing gives the bits of one without it.
    """
    made = fuse_sum(node, sources, readers)
    if made is None or made.sources[1].shape[-1] > LARGEST_RANK:
        return None
    other = made.sources[0].node
    return made if other and other.op in PRODUCTS else None


def fuse_cast(node: Node, sources: Sequence[Tensor], readers: Counter[Tensor]) -> Node | None:
    """Return a node that writes bf16 itself, if it makes what is only read by a cast to bf16."""
    source = node.sources[0] if node.op is cast else None
    if not (source and source.node and source.node.op in HALVED and node.attrs["dtype"] is BF16):
        return None
    maker = sources[0].node
    if source.dtype is not F32 or readers[source] != 1 or not maker:
        return None
    return Node(HALVED[maker.op], maker.sources, maker.attrs, node.outputs[0].name)


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
