"""Operands of matrix products: how a source lies, how it is packed whole by all threads, or a part of it by one.

All products are C[m, n] = sum over k of A[m, k] B[n, k]; they differ in which axis of a source lies contiguous.
"""

from dataclasses import dataclass
from math import ceil, prod
from typing import Any, NamedTuple

import numpy as np

from llamatrain.compiler.declare import I64, Call, KernelEntry, inline
from llamatrain.gguf.quants.kinds import COMPILED
from llamatrain.kernels.cpu import tiles
from llamatrain.kernels.cpu.dequantize import SLAB_BYTES, pack_quantized
from llamatrain.kernels.cpu.registry import Array
from llamatrain.kernels.quantized import Blocks

STRIP_ROWS = 64  # rows of the whole operand that one job packs
MIN_WORK = 200_000  # multiply-adds that pay for going parallel, and for a job
FLOATS, HALVES, BLOCKS = range(3)  # forms of a source; of a quantised one: BLOCKS + its type's number


def can_pack(x: Array | Blocks) -> bool:
    """Whether a product can read it."""
    return x.kind.number in COMPILED if isinstance(x, Blocks) else x.dtype in (np.float32, np.uint16)


@dataclass(frozen=True)
class Operand:
    """One side of a product: `count` rows of `k` elements for each entry of its leading axes."""

    source: Any  # an array, a quantised weight, or what a plan knows of one
    across: int  # 0: a row lies contiguous; 1: rows lie beside each other
    count: int
    k: int
    lead: tuple[int, ...] = ()
    row_stride: int = (
        0  # elements between rows, or between one of k and the next; 0: nothing lies between them
    )

    @property
    def form(self) -> int:
        if isinstance(self.source, Blocks):
            return BLOCKS + self.source.kind.number
        return HALVES if self.source.dtype == np.uint16 else FLOATS

    @property
    def cut_unit(self) -> int:
        """Rows between which it can be cut: beside each other, rows of a quantised weight come a block at a time."""
        return (
            max(tiles.SIDE, self.source.kind.block_size)
            if self.across and self.form >= BLOCKS
            else tiles.SIDE
        )

    @property
    def stride(self) -> int:
        """Elements between rows, or between one of k and the next; of a quantised weight, bytes between its own rows."""
        if isinstance(self.source, Blocks):
            return self.source.row_bytes
        return self.row_stride or (self.count if self.across else self.k)

    @property
    def slab_bytes(self) -> int:
        """What each thread needs to decode a slab of it."""
        return SLAB_BYTES if self.form >= BLOCKS else 0

    def entries(self, lead: tuple[int, ...]) -> np.ndarray:
        """Which entry of this operand serves each entry of the result."""
        return np.broadcast_to(np.arange(prod(self.lead)).reshape(self.lead), lead).ravel()

    def to_side(self, mode: int, start: int, depth: int, k_block: int) -> "Side":
        """This operand as entries take it, of k from `start` on."""
        return Side(
            mode=mode,
            source=self.source.raw if isinstance(self.source, Blocks) else self.source,
            form=self.form,
            across=self.across,
            stride=self.stride,
            rows=self.count,
            k=self.k,
            start=start,
            depth=min(depth, self.k - start),
            k_block=k_block,
        )


class Side(NamedTuple):
    """An operand, as compiled code sees it."""

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


class Packed(NamedTuple):
    """Memory of packed operands: `entry_bytes` for each entry of the whole one; from `spare` on `each` bytes for each thread."""

    memory: Any
    entry_bytes: int
    thread_offset: int
    thread_bytes: int


def pack_call(whole: Operand, side: Side, entries: np.ndarray, packed: Packed, *, is_a: bool) -> Call:
    strip = ceil(STRIP_ROWS / whole.cut_unit) * whole.cut_unit
    items = len(entries) * ceil(whole.count / strip) * max(1, ceil(side.depth / side.k_block))
    portion = ceil(MIN_WORK / 20 / (strip * side.k_block + 1))
    return pack_whole.call(side, entries, packed, is_a=is_a, strip=strip, items=items, block=portion)


# ---- compiled ----------------------------------------------------------------------------------


@inline
def pack_part(side, to, source, transpose, first, rows, start, depth, slab):
    """`rows` rows of an entry, from `first` on, of k `deep` from `start` on. `room`: ROOM bytes, for quantised ones."""
    form, across, stride = side.form, side.across, side.stride
    if form >= BLOCKS and across:
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
    """Where an entry of the source begins."""
    return side.source + entry * (side.rows * side.k * (2 if side.form else 4))


@KernelEntry
def pack_whole(lo, hi, thread, side: Side, entries: I64, packed: Packed, is_a, strip):
    strips, blocks = (side.rows + strip - 1) // strip, max(1, (side.depth + side.k_block - 1) // side.k_block)
    slab, transpose = (
        packed.memory + packed.thread_offset + thread * packed.thread_bytes,
        side.across if is_a else 1 - side.across,
    )
    for item in range(lo, hi):
        entry, first, k0 = (
            item // strips // blocks,
            item % strips * strip,
            item // strips % blocks * side.k_block,
        )
        rows, depth = min(strip, side.rows - first), min(side.k_block, side.depth - k0)
        to = packed.memory + entry * packed.entry_bytes
        to += tiles.panel_bytes(side.mode, side.rows, side.k_block) * (k0 // side.k_block)
        to += tiles.panel_bytes(side.mode, first, depth)
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
