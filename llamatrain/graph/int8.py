"""Products with frozen weights in 8-bit integers, as a rewrite of a graph whose gradients were derived already."""

from collections.abc import Mapping, Sequence

from llamatrain.graph.ops import (
    expert_matmul,
    expert_matmul_int8,
    expert_matmul_nn,
    expert_matmul_nn_int8,
    matmul,
    matmul_int8,
    matmul_nn,
    matmul_nn_int8,
)
from llamatrain.graph.rewrite import rebuild
from llamatrain.graph.tensor import Node, Op, Tensor

INT8_FORMS: dict[Op, Op] = {
    matmul: matmul_int8,
    matmul_nn: matmul_nn_int8,
    expert_matmul: expert_matmul_int8,
    expert_matmul_nn: expert_matmul_nn_int8,
}
ACROSS = (matmul_nn, expert_matmul_nn)  # products that sum over the rows of a weight

# What a product and the one across read: copies that are packed for them, or twice the weight itself.
Int8Copy = tuple[Tensor, Tensor]
Int8Weights = Mapping[Tensor, Int8Copy]  # by weight


def use_int8_products(outputs: Sequence[Tensor], weights: Int8Weights) -> list[Tensor]:
    """Return the outputs with every product with one of these weights in 8-bit integers."""

    def change(node: Node) -> Node | None:
        if node.op not in INT8_FORMS or node.sources[1] not in weights:
            return None
        x, w, *others = node.sources
        source = weights[w][node.op in ACROSS]
        return Node(INT8_FORMS[node.op], (x, source, *others), node.attrs, node.outputs[0].name)

    return rebuild(outputs, {}, change) if weights else list(outputs)
