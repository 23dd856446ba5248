"""Torch kernels of matrix products.

If a source is bfloat16, the others are rounded to it, and the product is added up in float32. It is written
in the type of its place, float32 or bfloat16.
Quantized weights are decoded one at a time, to the type of the product.
"""

from math import prod

import torch
from torch import Tensor

from llamatrain.graph.tensor import BF16, F32, Node, QuantizedType
from llamatrain.kernels.quantized import Blocks
from llamatrain.kernels.torch.dequantize import decode_bytes, dequantize
from llamatrain.kernels.torch.elementwise import Outs, copy_unless_same
from llamatrain.kernels.torch.registry import result_bytes, writing_kernel

aten = torch.ops.aten


def operand_bytes(node: Node) -> int:
    """Return the bytes of all sources that are converted for a product."""
    half = any(source.dtype is BF16 for source in node.sources)
    is_rounded = node.outputs[0].dtype is BF16 and not half
    total = 4 * node.outputs[0].size if is_rounded else 0
    # the value that is added to is not converted
    for source in node.sources[node.op.name.endswith("_add") :]:
        if isinstance(source.dtype, QuantizedType):
            total += (2 if half else 4) * source.size
            total += decode_bytes(source.dtype.kind, source.shape[0], prod(source.shape[1:]))
        elif half and source.dtype is F32 and len(source.shape) > 1:
            total += 2 * source.size
    return total


def operands(*sources: Tensor | Blocks) -> list[Tensor]:
    """Return the sources of a product in one type: bfloat16 if one of them is, else as they are."""
    half = any(source.dtype is torch.bfloat16 for source in sources)
    other = next((source.dtype for source in sources if isinstance(source, Tensor)), torch.float32)
    dtype = torch.bfloat16 if half else other
    return [decoded(source, dtype) if isinstance(source, Blocks) else source.to(dtype) for source in sources]


def decoded(weight: Blocks, dtype: torch.dtype) -> Tensor:
    """Return a quantized weight in a float type."""
    return dequantize(weight.raw, weight.kind, weight.raw.new_empty(weight.shape, dtype=dtype))


def has_mixed_products(x: Tensor) -> bool:
    """Return True if the device has products of bf16 whose results are float32: on NVIDIA's cards."""
    return x.device.type == "cuda" and torch.version.hip is None


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write the product of two matrices, or of stacks of them; it is added up in full precision."""
    if a.dtype is out.dtype:
        torch.matmul(a, b, out=out)
    elif a.dtype is not torch.bfloat16:
        out.copy_(torch.matmul(a, b))
    elif not has_mixed_products(a):
        torch.matmul(a.float(), b.float(), out=out)
    elif a.dim() == b.dim() == 2:
        aten.mm.dtype_out(a, b, torch.float32, out=out)
    else:
        shape = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        stacks = (x.expand(*shape, *x.shape[-2:]).reshape(-1, *x.shape[-2:]) for x in (a, b))
        aten.bmm.dtype_out(*stacks, torch.float32, out=out.view(-1, *out.shape[-2:]))


@writing_kernel(operand_bytes)
def matmul(x: Tensor, w: Tensor | Blocks, bias: Tensor | None = None, *, out: Outs) -> None:
    """Write x wᵀ, plus the bias in each row."""
    a, b = operands(x, w)
    multiply(a, b.mT, out[0])
    if bias is not None:
        out[0].add_(bias)


@writing_kernel(operand_bytes)
def matmul_nn(y: Tensor, w: Tensor | Blocks, *, out: Outs) -> None:
    """Write y w."""
    a, b = operands(y, w)
    multiply(a, b, out[0])


def add_product(a: Tensor, b: Tensor, y: Tensor, out: Tensor) -> None:
    """Write y plus the product of two matrices, which is added up in full precision."""
    copy_unless_same(y, out)
    if a.dtype is torch.bfloat16 and out.dtype is torch.float32 and has_mixed_products(a):
        aten.addmm.dtype_out(out, a, b, torch.float32, out=out)
    else:
        out.addmm_(a.to(out.dtype), b.to(out.dtype))


@writing_kernel(operand_bytes)
def matmul_add(y: Tensor, x: Tensor, w: Tensor | Blocks, *, out: Outs) -> None:
    """Write y + x wᵀ."""
    a, b = operands(x, w)
    add_product(a, b.mT, y, out[0])


@writing_kernel(operand_bytes)
def matmul_nn_add(y: Tensor, x: Tensor, w: Tensor | Blocks, *, out: Outs) -> None:
    """Write y + x w."""
    a, b = operands(x, w)
    add_product(a, b, y, out[0])


@writing_kernel(lambda node: operand_bytes(node) + result_bytes(node) * (len(node.sources[0].shape) > 2))
def out_prod(a: Tensor, b: Tensor, *, out: Outs) -> None:
    """Write aᵀ b."""
    a, b = operands(a, b)
    multiply(a.mT, b, out[0])
