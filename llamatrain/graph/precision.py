"""Mixed precision as a rewrite: matrix products get bfloat16 sources, as their op declares in `rounded_sources`.

An activation is rounded once for all products that read it, so what is kept for the gradients is half as
large. The same holds for the sources of a gate and for what a gate passes to products. A weight is not
rounded: products round it while packing, and its float32 master is the only copy.
"""

from collections.abc import Sequence
from typing import Literal

from llamatrain.graph.ops import cast, join_columns, reshape
from llamatrain.graph.rewrite import rebuild
from llamatrain.graph.tensor import BF16, F32, Node, QuantizedType, Tensor, find_base

Precision = Literal["f32", "bf16"]  # of the sources of products
BasePrecision = Literal["same", "int8"]  # of the sources of products with frozen weights


def round_products(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs with every product in bfloat16; sums stay in float32."""
    rounded: dict[Tensor, Tensor] = {}

    def round_tensor(tensor: Tensor) -> Tensor:
        if tensor.dtype is not F32:
            return tensor
        if tensor not in rounded:
            made = tensor.node
            if made and made.op is cast and made.sources[0].dtype is BF16:  # it was converted from bf16
                rounded[tensor] = made.sources[0]
            elif made and made.op is reshape:  # all readers in other shapes share the same bytes
                rounded[tensor] = reshape(round_tensor(made.sources[0]), **made.attrs)
            elif made and made.op is join_columns:
                rounded[tensor] = join_columns(*made.sources, dtype=BF16)
            else:
                rounded[tensor] = cast(tensor, dtype=BF16)
        return rounded[tensor]

    def change(node: Node) -> Node | Sequence[Tensor] | None:
        chosen = node.op.rounded_sources
        if not chosen or any(not _can_round(node.sources[index]) for index in chosen):
            return None
        weights = [index for index in chosen if find_base(node.sources[index]).role in ("parameter", "state")]
        # quantized weights cannot be rounded before
        weights.sort(key=lambda index: not isinstance(node.sources[index].dtype, QuantizedType))
        keep = weights[:1] if len(chosen) == 2 and not node.op.rounds_outputs else []
        sources = [
            round_tensor(s) if index in chosen and index not in keep else s
            for index, s in enumerate(node.sources)
        ]
        made = Node(node.op, tuple(sources), node.attrs, node.outputs[0].name)
        if node.op.rounds_outputs:
            return [cast(output, dtype=F32) for output in made.outputs]  # for readers that are not products
        return made

    return rebuild(outputs, {}, change)


def _can_round(source: Tensor) -> bool:
    return source.dtype in (F32, BF16) or isinstance(source.dtype, QuantizedType)
