"""Mixed precision as rewrites. Matrix products get bfloat16 sources, as their op declares in `rounded_sources`.

An activation is rounded once for all products that read it, so what is kept for the gradients is half as
large. The same holds for the sources of a gate and for what a gate passes to products. A weight is not
rounded: products round it while packing, and its float32 master is the only copy.

Sums are float32 and so are results, unless the device asks for `round_results`: where memory is what limits
speed, results that others round anyway, or that are read only within a block, are written in bfloat16.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from llamatrain.graph.ops import cast, join_columns, matmul_add, matmul_nn_add, reshape
from llamatrain.graph.rewrite import rebuild
from llamatrain.graph.tensor import BF16, F32, Node, QuantizedType, Tensor, collect_nodes, find_base

Precision = Literal["f32", "bf16"]  # of the sources of products
# what these add to has the type of their result
ADDING_PRODUCTS = {matmul_add, matmul_nn_add}
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


def round_results(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs of a graph whose nodes write in bfloat16 what all readers accept in it.

    Casts to bfloat16 accept it. Ops do by `bf16_sources`, from nodes that read bfloat16 themselves. The stream
    between blocks stays in float32.
    """
    nodes, kept = collect_nodes(outputs), set(outputs)
    readers: dict[Tensor, list[Node]] = defaultdict(list)
    for node in nodes:
        for source in node.sources:
            readers[source].append(node)

    def is_rounded(tensor: Tensor) -> bool:
        maker = find_base(tensor).node
        if tensor in kept or not maker or not readers[tensor]:
            return False
        is_half = any(source.dtype is BF16 for source in maker.sources)
        return all(accepts(reader, tensor, is_half) for reader in readers[tensor])

    def accepts(reader: Node, tensor: Tensor, is_half: bool) -> bool:
        if reader.op is cast:
            return reader.attrs["dtype"] is BF16
        if reader.op.layout or reader.op in ADDING_PRODUCTS:
            return reader.sources.index(tensor) == 0 and is_rounded(reader.outputs[0])
        return is_half and all(
            index in reader.op.bf16_sources for index, source in enumerate(reader.sources) if source is tensor
        )

    new: dict[Tensor, Tensor] = {}
    for node in nodes:
        sources = tuple(new.get(source, source) for source in node.sources)
        if node.op is cast and node.attrs["dtype"] is BF16 is sources[0].dtype:
            new[node.outputs[0]] = sources[0]
            continue
        chosen = (node.outputs[index] for index in node.op.bf16_outputs)
        rounded = frozenset(each.index for each in chosen if each.dtype is F32 and is_rounded(each))
        made = node.with_sources(sources)
        if rounded:
            made = Node(node.op, sources, node.attrs, node.outputs[0].name, rounded)
        if made is not node:
            new.update(zip(node.outputs, made.outputs, strict=True))
    return [new.get(output, output) for output in outputs]


def _can_round(source: Tensor) -> bool:
    return source.dtype in (F32, BF16) or isinstance(source.dtype, QuantizedType)
