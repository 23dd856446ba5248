"""Frozen weights that are rounded to 8-bit integers and packed once, not in every product: for x wᵀ or for dy w."""

import numpy as np

from llamatrain.compiler.thread_pool import CallTable
from llamatrain.graph.tensor import PackedType, Shape
from llamatrain.kernels.cpu import matmul
from llamatrain.kernels.cpu.pack import INT8, Operand, Packed, pack_call, panel_bytes
from llamatrain.kernels.quantized import Blocks
from llamatrain.platform.memory import allocate


def sides(shape: Shape, across: int) -> tuple[int, int]:
    """Return the columns of the product and the length of its sums, for w (n, k) or across, for w (k, n)."""
    return (shape[1], shape[0]) if across else (shape[0], shape[1])


def packed_type(shape: Shape, across: int) -> PackedType:
    """Return the type of a packed weight."""
    return PackedType("int8", np.dtype(np.uint8), panel_bytes(INT8, *sides(shape, across)))


def pack_weight(w: np.ndarray | Blocks, across: int, threads: int) -> np.ndarray:
    """Return a packed weight."""
    count, k = sides(w.shape, across)
    operand, k_block = Operand(w, across, count, k), min(k, matmul.largest_slice(INT8).k)
    slab_bytes = operand.slab_bytes(INT8)
    made = allocate(packed_type(w.shape, across).nbytes)
    packed = Packed(
        memory=made,
        entry_bytes=0,
        own=allocate(threads * slab_bytes),
        thread_bytes=slab_bytes,
        slab_bytes=slab_bytes,
    )
    side = operand.to_side(INT8, 0, k, k_block)
    CallTable([pack_call(operand, side, np.zeros(1, np.int64), packed, is_a=False)], threads)()
    return made
