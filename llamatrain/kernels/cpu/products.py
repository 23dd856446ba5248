"""Matrix products: y = x wᵀ, dx = dy w, dw = dyᵀ x, over leading axes that broadcast.

All are C[m, n] = sum over k of A[m, k] B[n, k]; the three differ in which axis of a source lies contiguous. The operand with
fewer rows is packed first, whole, by all threads. Then each job takes a slice of the other one, packs it for itself, and makes
the rows or columns of C that belong to it. k goes in blocks of one size in one order, so that jobs may be cut for balance:
no sum depends on it. What is too large to be packed at once is done a range of k, or a group of batch entries, at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod
from typing import Any

import numpy as np

from llamatrain.kernels.cpu import tiles
from llamatrain.kernels.cpu.binding import Array, kernel
from llamatrain.machine.jit import Call, Entry, i64

K_BLOCK = 1024  # a slice takes 256 KB of bf16, in the second-level cache; C is read and written once more for each block
PACKED = 3 << 20  # bytes of the whole operand that are packed at a time
SLICE = 128  # rows of the other operand, at most
STRIP = 64  # rows of the whole operand that one job packs
WORTH = 200_000  # multiply-adds that pay for going parallel, and for a job


@dataclass(frozen=True)
class Operand:
    """One side of a product: `count` rows of `k` elements for each entry of its leading axes."""

    source: Any  # an array, or what a plan knows of one
    across: int  # 0: a row lies contiguous; 1: rows lie beside each other
    count: int
    k: int
    lead: tuple[int, ...] = ()
    apart: int = 0  # elements between rows, or between one of k and the next; 0: nothing lies between them

    @property
    def half(self) -> int:
        return int(self.source.dtype == np.uint16)

    @property
    def stride(self) -> int:
        return self.apart or (self.count if self.across else self.k)

    def entries(self, lead: tuple[int, ...]) -> np.ndarray:
        """Which entry of this operand serves each entry of the result."""
        return np.broadcast_to(np.arange(prod(self.lead)).reshape(self.lead), lead).ravel()

    def words(self, mode: int, start: int, depth: int, block: int) -> tuple[Any, ...]:
        """This operand as entries take it, of k from `start` on."""
        depth = min(depth, self.k - start)
        return (mode, self.source, self.half, self.across, self.stride, self.count, self.k, start, depth, block)


def pack_call(whole: Operand, words: tuple[Any, ...], entries: np.ndarray, to: np.ndarray, entry_bytes: int, is_a: bool) -> Call:
    items = len(entries) * ceil(whole.count / STRIP)
    block = ceil(WORTH / 20 / (STRIP * words[8] + 1))
    return pack_whole.call(*words, entries, to, entry_bytes, int(is_a), items=items, block=block)


@dataclass(frozen=True)
class Product:
    a: Operand
    b: Operand
    mode: int
    threads: int

    @cached_property
    def lead(self) -> tuple[int, ...]:
        return np.broadcast_shapes(self.a.lead, self.b.lead)

    @property
    def whole_is_a(self) -> bool:
        return self.a.count < self.b.count

    @property
    def whole(self) -> Operand:
        return self.a if self.whole_is_a else self.b

    @property
    def sliced(self) -> Operand:
        return self.b if self.whole_is_a else self.a

    def packed(self, count: int, k: int) -> int:
        return tiles.packed_bytes(self.mode, count, k)

    @property
    def block(self) -> int:
        return max(1, min(self.a.k, K_BLOCK))

    @cached_property
    def range(self) -> int:
        """How much of k is packed at a time: whole blocks."""
        blocks = max(1, PACKED // self.packed(self.whole.count, self.block))
        return self.block * min(blocks, max(1, ceil(self.a.k / self.block)))

    @property
    def entry_bytes(self) -> int:
        return self.packed(self.whole.count, self.block) * (self.range // self.block)

    @cached_property
    def group(self) -> int:
        """How many entries of the result are done at a time."""
        return min(prod(self.lead), max(1, PACKED // self.entry_bytes))

    @cached_property
    def width(self) -> int:
        """Rows of a slice: several jobs a thread, each worth its while."""
        strip = tiles.SIDE * self.whole.count * self.block
        strips = ceil(self.sliced.count / tiles.SIDE)
        fair = ceil(strips * self.group / (4 * self.threads))
        return tiles.SIDE * min(max(fair, ceil(WORTH / max(1, strip))), SLICE // tiles.SIDE, strips)

    @property
    def slice_bytes(self) -> int:
        return self.packed(self.width, self.block)

    @property
    def scratch(self) -> int:
        return self.group * self.entry_bytes + self.threads * self.slice_bytes

    def calls(self, c: np.ndarray, scratch: np.ndarray, accumulate: bool = False) -> list[Call]:
        made = []
        whole, sliced = (operand.entries(self.lead) for operand in (self.whole, self.sliced))
        for first in range(0, prod(self.lead), self.group):
            here = slice(first, first + self.group)
            packed, slots = np.unique(whole[here], return_inverse=True)
            for start in range(0, max(1, self.a.k), self.range):
                made.append(self.pack(scratch, packed, start))
                made.append(self.multiply(c, scratch, first, sliced[here], slots, start, accumulate or start > 0))
        return made

    def pack(self, scratch: np.ndarray, entries: np.ndarray, start: int) -> Call:
        words = self.whole.words(self.mode, start, self.range, self.block)
        return pack_call(self.whole, words, entries, scratch, self.entry_bytes, self.whole_is_a)

    def multiply(
        self, c: np.ndarray, scratch: np.ndarray, first: int, entries: np.ndarray, slots: np.ndarray, start: int, more: bool
    ) -> Call:
        slices = ceil(self.sliced.count / self.width)
        work = self.width * self.whole.count * self.a.k
        words = self.sliced.words(self.mode, start, self.range, self.block)
        args = (*words, entries, scratch, self.entry_bytes, int(self.whole_is_a))
        args += (
            slots,
            self.whole.count,
            self.group * self.entry_bytes,
            self.slice_bytes,
            self.width,
            slices,
            c,
            first,
            int(more),
        )
        return multiply_slices.call(*args, items=len(entries) * slices, block=ceil(WORTH / max(1, work)))


# ---- compiled ----------------------------------------------------------------------------------


@Entry
def pack_whole(lo, hi, thread, a):  # type: ignore[no-untyped-def]
    mode, source, half, across, stride, count, k, start, depth, block = a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9]
    entries, packed, entry_bytes, is_a = i64(a[10]), a[11], a[12], a[13]
    strips, size = (count + STRIP - 1) // STRIP, 2 if half else 4
    turned = across if is_a else 1 - across
    for item in range(lo, hi):
        entry, first = item // strips, item % strips * STRIP
        to = packed + entry * entry_bytes
        rows = min(STRIP, count - first)
        for k0 in range(0, max(1, depth), block):
            deep = min(block, depth - k0)
            begin = entries[entry] * count * k + (first + (start + k0) * stride if across else first * stride + start + k0)
            place = to + tiles.panel_bytes(mode, first, deep)
            tiles.pack(mode, place, source + begin * size, half, across, turned, stride, rows, deep)
            to += tiles.panel_bytes(mode, count, deep)


@Entry
def multiply_slices(lo, hi, thread, a):  # type: ignore[no-untyped-def]
    mode, source, half, across, stride, count, k, start, depth, block = a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9]
    entries, packed, entry_bytes, whole_is_a = i64(a[10]), a[11], a[12], a[13]
    slots, other, room, room_bytes, width, slices = i64(a[14]), a[15], a[16], a[17], a[18], a[19]
    c, c_first, accumulate = a[20], a[21], a[22]
    size, turned = 2 if half else 4, 1 - across if whole_is_a else across
    mine = packed + room + thread * room_bytes
    ldc = count if whole_is_a else other
    tiles.begin(mode)
    for item in range(lo, hi):
        entry, first = item // slices, item % slices * width
        rows, whole = min(width, count - first), packed + slots[entry] * entry_bytes
        corner = c + ((c_first + entry) * count * other + (first if whole_is_a else first * ldc)) * 4
        for k0 in range(0, max(1, depth), block):
            deep = min(block, depth - k0)
            begin = entries[entry] * count * k + (first + (start + k0) * stride if across else first * stride + start + k0)
            tiles.pack(mode, mine, source + begin * size, half, across, turned, stride, rows, deep)
            more = accumulate or k0 > 0
            left, right, m, n = (whole, mine, other, rows) if whole_is_a else (mine, whole, rows, other)
            tiles.multiply(mode, corner, ldc, left, right, m, n, deep, more, whole_is_a)
            whole += tiles.panel_bytes(mode, other, deep)
    tiles.end(mode)


# ---- the ops -----------------------------------------------------------------------------------


def product(x: Operand, y: Operand, threads: int) -> Product:
    """In bf16 where one source is."""
    return Product(x, y, tiles.mode_of("bf16" if x.half or y.half else "f32"), threads)


def with_weight(x: Array, w: Array, across: int) -> tuple[Operand, Operand]:
    """x (..., m, k) with w (..., n, k), across: (..., k, n). Where w has no leading axes, all rows of x at once."""
    (*x_lead, m, k), (*w_lead, n, last) = x.shape, w.shape
    n = last if across else n
    if prod(w_lead) == 1:
        m, x_lead, w_lead = m * prod(x_lead), [], []
    return Operand(x, 0, m, k, tuple(x_lead)), Operand(w, across, n, k, tuple(w_lead))


def matmul_plan(ins: Sequence[Any], threads: int) -> Product:
    x, w = ins
    return product(*with_weight(x, w, across=0), threads)


def matmul_nn_plan(ins: Sequence[Any], threads: int) -> Product:
    y, w = ins
    return product(*with_weight(y, w, across=1), threads)


def out_prod_plan(ins: Sequence[Any], threads: int) -> Product:
    a, b = (Operand(x, 1, x.shape[-1], x.shape[-2], tuple(x.shape[:-2])) for x in ins)
    return product(a, b, threads)


def takes(outs: Sequence[Array], ins: Sequence[Array], attrs: dict[str, Any]) -> bool:
    return outs[0].dtype == np.float32 and all(x.dtype in (np.float32, np.uint16) for x in ins)


def register(op: str, plan: Any) -> None:
    def scratch(outs: Sequence[Array], ins: Sequence[Array], attrs: dict[str, Any], threads: int) -> int:
        return int(plan(ins, threads).scratch) if prod(outs[0].shape) else 0

    @kernel(op, scratch, takes)
    def bind(outs: Sequence[np.ndarray], ins: Sequence[np.ndarray], attrs: Any, scratch: np.ndarray, threads: int) -> list[Call]:
        return plan(ins, threads).calls(outs[0], scratch) if outs[0].size else []


register("matmul", matmul_plan)
register("matmul_nn", matmul_nn_plan)
register("out_prod", out_prod_plan)
