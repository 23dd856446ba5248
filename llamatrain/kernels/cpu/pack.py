"""Operands of matrix products: how a source is laid out, and how it is packed, whole by all threads or in part by one.

All products are C[m, n] = sum over k of A[m, k] B[n, k]; they differ in which axis of a source is contiguous.
The modes are those of tiles.py, and INT8 for products of 8-bit integers (int8_tiles.py).
"""

from dataclasses import dataclass
from math import ceil, prod
from typing import Any, NamedTuple

import numpy as np

from llamatrain.compiler.declare import I64, Call, KernelEntry, inline
from llamatrain.gguf.quants.kinds import BF16, COMPILED, F32
from llamatrain.kernels.cpu import tiles
from llamatrain.kernels.cpu.dequantize import SLAB_BYTES, pack_quantized
from llamatrain.kernels.cpu.int8_tiles import (
    INT8_SLAB_BYTES,
    int8_panel_bytes,
    multiply_int8_call,
    pack_int8,
)
from llamatrain.kernels.cpu.registry import Array
from llamatrain.kernels.quantized import Blocks, PackedWeight

STRIP_ROWS = 64  # rows of the whole operand that one job packs
MIN_WORK = 200_000  # multiply-adds that are worth a job
INT8 = tiles.TILES + 1  # a further mode
FLOATS, HALVES, PACKED, BLOCKS = range(4)  # forms of a source; quantized: BLOCKS + the number of its type


def can_pack(x: Array | Blocks | PackedWeight) -> bool:
    """Return True if a product can read x."""
    if isinstance(x, PackedWeight):
        return True
    return x.kind.number in COMPILED if isinstance(x, Blocks) else x.dtype in (np.float32, np.uint16)


@dataclass(frozen=True)
class Operand:
    """One side of a product: `count` rows of `k` elements for each entry of its leading axes."""

    source: Any  # an array, a quantized or packed weight, or its spec
    across: int  # 0: a row is contiguous; 1: rows are interleaved
    count: int
    k: int
    lead: tuple[int, ...] = ()
    row_stride: int = 0  # elements between rows, or between neighbors along k; 0: dense
    at_random: bool = False  # 8-bit integers are rounded up or down at random

    @property
    def form(self) -> int:
        """The form of the source; for a quantized one, BLOCKS plus the number of its type."""
        if isinstance(self.source, PackedWeight):
            return PACKED
        if isinstance(self.source, Blocks):
            return BLOCKS + self.source.kind.number
        return HALVES if self.source.dtype == np.uint16 else FLOATS

    @property
    def cut_unit(self) -> int:
        """The number of rows at whose multiples the operand can be cut.

        With `across`, rows of a quantized weight come a block at a time.
        """
        return (
            max(tiles.SIDE, self.source.kind.block_size)
            if self.across and self.form >= BLOCKS
            else tiles.SIDE
        )

    @property
    def stride(self) -> int:
        """The distance between rows, or between neighbors along k.

        It is in elements, or in bytes for a quantized weight.
        """
        if isinstance(self.source, Blocks):
            return self.source.row_bytes
        return self.row_stride or (self.count if self.across else self.k)

    def slab_bytes(self, mode: int) -> int:
        """Return the bytes that each thread needs to decode a slab of it."""
        return INT8_SLAB_BYTES if mode == INT8 else SLAB_BYTES if self.form >= BLOCKS else 0

    def entries(self, lead: tuple[int, ...]) -> np.ndarray:
        """Return which entry of this operand is used for each entry of the result."""
        return np.broadcast_to(np.arange(prod(self.lead)).reshape(self.lead), lead).ravel()

    def to_side(self, mode: int, start: int, depth: int, k_block: int) -> "Side":
        """Return this operand as an argument of entries, with k from `start` on."""
        return Side(
            mode=mode,
            source=self.source.raw if self.form >= PACKED else self.source,
            form=self.form,
            across=self.across,
            stride=self.stride,
            rows=self.count,
            k=self.k,
            start=start,
            depth=min(depth, self.k - start),
            k_block=k_block,
            at_random=self.at_random,
        )


class Side(NamedTuple):
    """An operand in compiled code."""

    mode: int
    source: Any
    form: int
    across: int
    stride: int
    rows: int
    k: int
    start: int
    depth: int
    k_block: int
    at_random: int


class Packed(NamedTuple):
    """The memory of packed operands.

    `entry_bytes` for each entry of the whole one; in `own`, `thread_bytes` for each thread, which end with
    `slab_bytes` to decode a slab.
    """

    memory: Any
    entry_bytes: int
    own: Any
    thread_bytes: int
    slab_bytes: int


def pack_call(whole: Operand, side: Side, entries: np.ndarray, packed: Packed, *, is_a: bool) -> Call:
    """Return the call that packs a whole operand."""
    strip = ceil(STRIP_ROWS / whole.cut_unit) * whole.cut_unit
    items = len(entries) * ceil(whole.count / strip) * max(1, ceil(side.depth / side.k_block))
    portion = ceil(MIN_WORK / 20 / (strip * side.k_block + 1))
    return pack_whole.call(side, entries, packed, is_a=is_a, strip=strip, items=items, block=portion)


# ---- compiled ----------------------------------------------------------------------------------


@inline
def panel_bytes(mode, count, k):
    """Return the packed bytes of `count` rows of A or columns of B."""
    return int8_panel_bytes(count, k) if mode == INT8 else tiles.panel_bytes(mode, count, k)


@inline
def multiply(mode, c, ldc, a, b, m, n, k, accumulate, by_rows):
    """Multiply packed operands."""
    if mode == INT8:
        multiply_int8_call((c, ldc, a, b, m, n, k, accumulate))
    else:
        tiles.multiply(mode, c, ldc, a, b, m, n, k, accumulate, by_rows)


@inline
def pack_part(side, to, source, transpose, first, rows, start, depth, slab):
    """Pack `rows` rows from `first` on, with `depth` elements of k from `start` on.

    `slab` is memory to decode into, for quantized sources and 8-bit integers.
    """
    form, across, stride = side.form, side.across, side.stride
    if side.mode == INT8:
        kind = form - BLOCKS if form >= BLOCKS else BF16 if form else F32
        row_bytes = stride if form >= BLOCKS else stride * (2 if form else 4)
        is_a = transpose == across
        pack_int8(is_a, across, to, kind, source, row_bytes, first, rows, start, depth, side.at_random, slab)
    elif form >= BLOCKS and across:
        pack_quantized(side.mode, to, form - BLOCKS, source, stride, across, start, depth, first, rows, slab)
    elif form >= BLOCKS:
        pack_quantized(side.mode, to, form - BLOCKS, source, stride, across, first, rows, start, depth, slab)
    else:
        offset = first + start * stride if across else first * stride + start
        tiles.pack(
            side.mode, to, source + offset * (2 if form else 4), form, across, transpose, stride, rows, depth
        )


@inline
def entry_address(side, entry):
    """Return the address of an entry of the source."""
    return side.source + entry * (side.rows * side.k * (2 if side.form else 4))


@KernelEntry
def pack_whole(lo, hi, thread, side: Side, entries: I64, packed: Packed, is_a, strip):
    """Pack strips lo to hi of a whole operand."""
    strips, blocks = (side.rows + strip - 1) // strip, max(1, (side.depth + side.k_block - 1) // side.k_block)
    slab = packed.own + thread * packed.thread_bytes
    transpose = side.across if is_a else 1 - side.across
    for item in range(lo, hi):
        entry = item // strips // blocks
        first = item % strips * strip
        k0 = item // strips % blocks * side.k_block
        rows, depth = min(strip, side.rows - first), min(side.k_block, side.depth - k0)
        to = packed.memory + entry * packed.entry_bytes
        to += panel_bytes(side.mode, side.rows, side.k_block) * (k0 // side.k_block)
        to += panel_bytes(side.mode, first, depth)
        pack_part(
            side,
            to,
            entry_address(side, entries[entry]),
            transpose,
            first,
            rows,
            side.start + k0,
            depth,
            slab,
        )
