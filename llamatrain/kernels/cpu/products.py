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

from llamatrain.files.quants.kinds import COMPILED
from llamatrain.kernels.blocks import Blocks
from llamatrain.kernels.cpu import tiles
from llamatrain.kernels.cpu.binding import Array, kernel
from llamatrain.kernels.cpu.few_rows import MOST, FewRows
from llamatrain.kernels.cpu.quantised import ROOM, pack_quantised
from llamatrain.machine.entry import Call, Entry, i64
from llamatrain.machine.jit import inline

K_BLOCK = 1024  # a slice takes 256 KB of bf16, in the second-level cache; C is read and written once more for each block
PACKED = 3 << 20  # bytes of the whole operand that are packed at a time
SLICE = 128  # rows of the other operand, at most
STRIP = 64  # rows of the whole operand that one job packs
WORTH = 200_000  # multiply-adds that pay for going parallel, and for a job
FLOATS, HALVES, BLOCKS = range(3)  # forms of a source; of a quantised one: BLOCKS + its type's number


@dataclass(frozen=True)
class Operand:
    """One side of a product: `count` rows of `k` elements for each entry of its leading axes."""

    source: Any  # an array, a quantised weight, or what a plan knows of one
    across: int  # 0: a row lies contiguous; 1: rows lie beside each other
    count: int
    k: int
    lead: tuple[int, ...] = ()
    apart: int = 0  # elements between rows, or between one of k and the next; 0: nothing lies between them

    @property
    def form(self) -> int:
        if isinstance(self.source, Blocks):
            return BLOCKS + self.source.kind.number
        return HALVES if self.source.dtype == np.uint16 else FLOATS

    @property
    def unit(self) -> int:
        """Rows between which it can be cut: beside each other, rows of a quantised weight come a block at a time."""
        return max(tiles.SIDE, self.source.kind.block) if self.across and self.form >= BLOCKS else tiles.SIDE

    @property
    def stride(self) -> int:
        """Elements between rows, or between one of k and the next; of a quantised weight, bytes between its own rows."""
        if isinstance(self.source, Blocks):
            return self.source.row_bytes
        return self.apart or (self.count if self.across else self.k)

    @property
    def room(self) -> int:
        """What each thread needs to decode a slab of it."""
        return ROOM if self.form >= BLOCKS else 0

    def entries(self, lead: tuple[int, ...]) -> np.ndarray:
        """Which entry of this operand serves each entry of the result."""
        return np.broadcast_to(np.arange(prod(self.lead)).reshape(self.lead), lead).ravel()

    def words(self, mode: int, start: int, depth: int, block: int) -> tuple[Any, ...]:
        """This operand as entries take it, of k from `start` on."""
        depth = min(depth, self.k - start)
        memory = self.source.raw if isinstance(self.source, Blocks) else self.source
        return (mode, memory, self.form, self.across, self.stride, self.count, self.k, start, depth, block)


def pack_call(
    whole: Operand,
    words: tuple[Any, ...],
    entries: np.ndarray,
    to: np.ndarray,
    entry_bytes: int,
    is_a: bool,
    spare: int,
    each: int,
) -> Call:
    """`spare`: where in `to` memory of the threads' own begins, `each` bytes for each."""
    depth, block = words[8:10]
    strip = ceil(STRIP / whole.unit) * whole.unit
    items = len(entries) * ceil(whole.count / strip) * max(1, ceil(depth / block))
    portion = ceil(WORTH / 20 / (strip * block + 1))
    return pack_whole.call(*words, entries, to, entry_bytes, int(is_a), strip, spare, each, items=items, block=portion)


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
        best = tiles.SIDE * min(max(fair, ceil(WORTH / max(1, strip))), SLICE // tiles.SIDE, strips)
        return ceil(best / self.sliced.unit) * self.sliced.unit

    @property
    def slice_bytes(self) -> int:
        """What a thread needs: a slice, packed, and room to decode."""
        return self.packed(self.width, self.block) + self.a.room + self.b.room

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
        spare = (self.group * self.entry_bytes, self.slice_bytes)
        return pack_call(self.whole, words, entries, scratch, self.entry_bytes, self.whole_is_a, *spare)

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


@inline
def pack_part(mode, to, source, form, across, turned, stride, first, rows, start, deep, room):
    """`rows` rows from `first` on, of k `deep` from `start` on. `room`: ROOM bytes of the thread's own, for quantised ones."""
    if form >= BLOCKS and across:
        pack_quantised(mode, to, form - BLOCKS, source, stride, across, start, deep, first, rows, room)
    elif form >= BLOCKS:
        pack_quantised(mode, to, form - BLOCKS, source, stride, across, first, rows, start, deep, room)
    else:
        begin = first + start * stride if across else first * stride + start
        tiles.pack(mode, to, source + begin * (2 if form else 4), form, across, turned, stride, rows, deep)


@Entry
def pack_whole(lo, hi, thread, a):
    mode, source, form, across, stride, count, k, start, depth, block = a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9]
    entries, packed, entry_bytes, is_a, strip = i64(a[10]), a[11], a[12], a[13], a[14]
    room = packed + a[15] + thread * a[16]
    strips, blocks = (count + strip - 1) // strip, max(1, (depth + block - 1) // block)
    entry_size, turned = count * k * (2 if form else 4), across if is_a else 1 - across
    for item in range(lo, hi):
        entry, first, k0 = item // strips // blocks, item % strips * strip, item // strips % blocks * block
        rows, deep = min(strip, count - first), min(block, depth - k0)
        to = packed + entry * entry_bytes + tiles.panel_bytes(mode, count, block) * (k0 // block)
        to += tiles.panel_bytes(mode, first, deep)
        here = source + entries[entry] * entry_size
        pack_part(mode, to, here, form, across, turned, stride, first, rows, start + k0, deep, room)


@Entry
def multiply_slices(lo, hi, thread, a):
    mode, source, form, across, stride, count, k, start, depth, block = a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9]
    entries, packed, entry_bytes, whole_is_a = i64(a[10]), a[11], a[12], a[13]
    slots, other, room, room_bytes, width, slices = i64(a[14]), a[15], a[16], a[17], a[18], a[19]
    c, c_first, accumulate = a[20], a[21], a[22]
    entry_size, turned = count * k * (2 if form else 4), 1 - across if whole_is_a else across
    mine = packed + room + thread * room_bytes
    decoding = mine + room_bytes - ROOM  # only quantised sources have that
    ldc = count if whole_is_a else other
    tiles.begin(mode)
    for item in range(lo, hi):
        entry, first = item // slices, item % slices * width
        rows, whole = min(width, count - first), packed + slots[entry] * entry_bytes
        corner = c + ((c_first + entry) * count * other + (first if whole_is_a else first * ldc)) * 4
        for k0 in range(0, max(1, depth), block):
            deep = min(block, depth - k0)
            here = source + entries[entry] * entry_size
            pack_part(mode, mine, here, form, across, turned, stride, first, rows, start + k0, deep, decoding)
            more = accumulate or k0 > 0
            left, right, m, n = (whole, mine, other, rows) if whole_is_a else (mine, whole, rows, other)
            tiles.multiply(mode, corner, ldc, left, right, m, n, deep, more, whole_is_a)
            whole += tiles.panel_bytes(mode, other, deep)
    tiles.end(mode)


# ---- the ops -----------------------------------------------------------------------------------


def product(x: Operand, y: Operand, threads: int) -> Product:
    """In bf16 where one source is."""
    return Product(x, y, tiles.mode_of("bf16" if HALVES in (x.form, y.form) else "f32"), threads)


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


def matmul_way(ins: Sequence[Any], threads: int) -> Product | FewRows:
    made = matmul_plan(ins, threads)
    if made.lead or made.a.count > MOST or not made.a.k:
        return made
    x, w = ins
    return FewRows(x, w, made.mode != tiles.FLOAT32, threads)


def matmul_nn_plan(ins: Sequence[Any], threads: int) -> Product:
    y, w = ins
    return product(*with_weight(y, w, across=1), threads)


def out_prod_plan(ins: Sequence[Any], threads: int) -> Product:
    a, b = (Operand(x, 1, x.shape[-1], x.shape[-2], tuple(x.shape[:-2])) for x in ins)
    return product(a, b, threads)


def takes(outs: Sequence[Array], ins: Sequence[Array], attrs: dict[str, Any]) -> bool:
    return outs[0].dtype == np.float32 and all(packs(x) for x in ins)


def packs(x: Array | Blocks) -> bool:
    """Whether a product can read it."""
    return x.kind.number in COMPILED if isinstance(x, Blocks) else x.dtype in (np.float32, np.uint16)


def register(op: str, plan: Any) -> None:
    def scratch(outs: Sequence[Array], ins: Sequence[Array], attrs: dict[str, Any], threads: int) -> int:
        return int(plan(ins, threads).scratch) if prod(outs[0].shape) else 0

    @kernel(op, scratch, takes)
    def bind(outs: Sequence[np.ndarray], ins: Sequence[np.ndarray], attrs: Any, scratch: np.ndarray, threads: int) -> list[Call]:
        return plan(ins, threads).calls(outs[0], scratch) if outs[0].size else []


register("matmul", matmul_way)
register("matmul_nn", matmul_nn_plan)
register("out_prod", out_prod_plan)
