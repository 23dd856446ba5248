"""Matrix products: y = x wᵀ, dx = dy w, dw = dyᵀ x, over leading axes that broadcast.

All are C[m, n] = sum over k of A[m, k] B[n, k]; they differ in which axis of a source is contiguous. The
operand with fewer rows is packed first, as a whole, by all threads. Then each job takes a slice of the other
one, packs it for itself, and computes the rows or columns of C that belong to it. k is processed in blocks of
one size in one order, so that jobs may be cut for balance: no sum depends on it. If the whole operand is too
large to be packed at once, a range of k or a group of batch entries is processed at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, prod
from typing import Any, NamedTuple

import numpy as np

from llamatrain.compiler.declare import I64, Call, KernelEntry, f32, inline
from llamatrain.compiler.vectors import LANES, load_until, store_until
from llamatrain.kernels.cpu import tiles
from llamatrain.kernels.cpu.gemv import MAX_ROWS, GemvPlan
from llamatrain.kernels.cpu.pack import (
    HALVES,
    INT8,
    MIN_WORK,
    PACKED,
    Operand,
    Packed,
    Side,
    can_pack,
    entry_address,
    multiply,
    pack_call,
    pack_part,
    panel_bytes,
)
from llamatrain.kernels.cpu.registry import Array, kernel
from llamatrain.kernels.cpu.split_concat import as_columns, copy_calls
from llamatrain.kernels.cpu.thin import ThinPlan, choose_thin
from llamatrain.kernels.cpu.tile_shape import INT8_BY_TILES
from llamatrain.platform.cpu import has_int8_products

MAX_PACKED_BYTES = 3 << 20  # the most bytes of the whole operand that are packed at a time


class Slice(NamedTuple):
    """Rows of the sliced operand and elements of k that fit in the second-level cache."""

    rows: int
    k: int


def largest_slice(mode: int) -> Slice:
    """Return the largest slice.

    C is read and written once more for each block of k. The tile unit finishes a slice before the next one
    arrives, so its slices are larger.
    """
    if mode == tiles.TILES or (mode == INT8 and INT8_BY_TILES):
        return Slice(256, 2048)
    return Slice(256, 512) if mode == INT8 else Slice(128, 1024)


@dataclass(frozen=True)
class Product:
    """The plan of a matrix product."""

    a: Operand
    b: Operand
    mode: int
    threads: int

    @cached_property
    def lead(self) -> tuple[int, ...]:
        """The leading axes of the result."""
        return np.broadcast_shapes(self.a.lead, self.b.lead)

    @property
    def whole_is_a(self) -> bool:
        """True if A is packed as a whole and B is sliced."""
        return self.a.count < self.b.count

    @property
    def whole(self) -> Operand:
        """The operand that is packed as a whole."""
        return self.a if self.whole_is_a else self.b

    @property
    def sliced(self) -> Operand:
        """The operand that is sliced."""
        return self.b if self.whole_is_a else self.a

    @property
    def whole_is_packed(self) -> bool:
        """True if the whole operand is a weight that was packed before."""
        return self.whole.form == PACKED

    def packed_bytes(self, count: int, k: int) -> int:
        """Return the bytes of a packed operand."""
        return panel_bytes(INT8, count, k) if self.mode == INT8 else tiles.packed_bytes(self.mode, count, k)

    @property
    def k_block(self) -> int:
        """The length of a block of k."""
        return max(1, min(self.a.k, largest_slice(self.mode).k))

    @cached_property
    def k_range(self) -> int:
        """The length of k that is packed at a time: whole blocks."""
        fitting = max(1, MAX_PACKED_BYTES // self.packed_bytes(self.whole.count, self.k_block))
        blocks = max(1, ceil(self.a.k / self.k_block))
        return self.k_block * (blocks if self.whole_is_packed else min(blocks, fitting))

    @property
    def entry_bytes(self) -> int:
        """The bytes to pack the whole operand for one entry of the leading axes."""
        if self.whole_is_packed:
            return 0
        return self.packed_bytes(self.whole.count, self.k_block) * (self.k_range // self.k_block)

    @cached_property
    def entries_at_once(self) -> int:
        """The number of entries of the result that are computed at a time."""
        return min(prod(self.lead), max(1, MAX_PACKED_BYTES // max(1, self.entry_bytes)))

    @cached_property
    def slice_rows(self) -> int:
        """The rows of a slice: several jobs for each thread, each large enough to be worth it."""
        strip = tiles.SIDE * self.whole.count * self.k_block
        strips = ceil(self.sliced.count / tiles.SIDE)
        fair = ceil(strips * self.entries_at_once / (4 * self.threads))
        best = tiles.SIDE * min(
            max(fair, ceil(MIN_WORK / max(1, strip))), largest_slice(self.mode).rows // tiles.SIDE, strips
        )
        return ceil(best / self.sliced.cut_unit) * self.sliced.cut_unit

    @property
    def slice_bytes(self) -> int:
        """The bytes that a thread needs: a packed slice, and a slab to decode."""
        return self.packed_bytes(self.slice_rows, self.k_block) + self.slab_bytes

    @property
    def slab_bytes(self) -> int:
        """The bytes that a thread needs to decode a slab of an operand."""
        return max(each.slab_bytes(self.mode) for each in (self.a, self.b))

    @property
    def scratch(self) -> int:
        """The bytes of scratch memory."""
        return self.entries_at_once * self.entry_bytes + self.threads * self.slice_bytes

    def calls(
        self, c: np.ndarray, scratch: np.ndarray, accumulate: bool = False, bias: Any = 0
    ) -> list[Call]:
        """Return the calls that compute C, plus a bias for each row if given."""
        calls = []
        whole, sliced = (operand.entries(self.lead) for operand in (self.whole, self.sliced))
        for first in range(0, prod(self.lead), self.entries_at_once):
            here = slice(first, first + self.entries_at_once)
            packed, slots = np.unique(whole[here], return_inverse=True)
            for start in range(0, max(1, self.a.k), self.k_range):
                if not self.whole_is_packed:
                    calls.append(self.pack_call(scratch, packed, start))
                ends = {
                    "accumulate": accumulate or start > 0,
                    "bias": bias if start + self.k_range >= self.a.k else 0,
                }
                calls.append(self.multiply_call(c, scratch, first, sliced[here], slots, start, ends))
        return calls

    def packed_memory(self, scratch: np.ndarray) -> Packed:
        """Return the layout of the packed operands."""
        return Packed(
            memory=self.whole.source.raw if self.whole_is_packed else scratch,
            entry_bytes=self.entry_bytes,
            own=scratch[self.entries_at_once * self.entry_bytes :],
            thread_bytes=self.slice_bytes,
            slab_bytes=self.slab_bytes,
        )

    def pack_call(self, scratch: np.ndarray, entries: np.ndarray, start: int) -> Call:
        """Return the call that packs the whole operand."""
        side = self.whole.to_side(self.mode, start, self.k_range, self.k_block)
        return pack_call(self.whole, side, entries, self.packed_memory(scratch), is_a=self.whole_is_a)

    def multiply_call(
        self,
        c: np.ndarray,
        scratch: np.ndarray,
        first: int,
        entries: np.ndarray,
        slots: np.ndarray,
        start: int,
        ends: Any,
    ) -> Call:
        """Return the call that packs and multiplies the slices."""
        work = self.slice_rows * self.whole.count * self.a.k
        return multiply_slices.call(
            side=self.sliced.to_side(self.mode, start, self.k_range, self.k_block),
            entries=entries,
            packed=self.packed_memory(scratch),
            whole_is_a=self.whole_is_a,
            slots=slots,
            other=self.whole.count,
            width=self.slice_rows,
            c=c,
            first_entry=first,
            **ends,
            items=len(entries) * ceil(self.sliced.count / self.slice_rows),
            block=ceil(MIN_WORK / max(1, work)),
        )


# ---- compiled ----------------------------------------------------------------------------------


@inline
def add_bias(c, ldc, bias, rows, columns):
    """Add a bias to rows of C."""
    for row in range(rows):
        start, end = row * ldc, row * ldc + columns
        for j in range(0, columns, LANES):
            store_until(c, start + j, end, load_until(c, start + j, end) + load_until(bias, j, columns), 0)


@KernelEntry
def multiply_slices(
    lo,
    hi,
    thread,
    side: Side,
    entries: I64,
    packed: Packed,
    whole_is_a,
    slots: I64,
    other,
    width,
    c,
    first_entry,
    accumulate,
    bias,
):
    """Pack slices lo to hi and multiply them with the whole operand."""
    mode, count, transpose = side.mode, side.rows, 1 - side.across if whole_is_a else side.across
    slices = (count + width - 1) // width
    thread_memory = packed.own + thread * packed.thread_bytes
    decoding = thread_memory + packed.thread_bytes - packed.slab_bytes
    ldc = count if whole_is_a else other
    unit = tiles.TILES if INT8_BY_TILES and mode == INT8 else mode
    tiles.configure_tiles(unit)
    for item in range(lo, hi):
        entry, first = item // slices, item % slices * width
        rows, whole = min(width, count - first), packed.memory + slots[entry] * packed.entry_bytes
        corner = c + ((first_entry + entry) * count * other + (first if whole_is_a else first * ldc)) * 4
        for k0 in range(0, max(1, side.depth), side.k_block):
            depth = min(side.k_block, side.depth - k0)
            part, more = thread_memory, accumulate or k0 > 0
            if side.form == PACKED:
                part = side.source + panel_bytes(mode, count, side.k_block) * (
                    (side.start + k0) // side.k_block
                )
                part += panel_bytes(mode, first, depth)
            else:
                source = entry_address(side, entries[entry])
                pack_part(side, part, source, transpose, first, rows, side.start + k0, depth, decoding)
            left, right, m, n = (whole, part, other, rows) if whole_is_a else (part, whole, rows, other)
            multiply(mode, corner, ldc, left, right, m, n, depth, more, whole_is_a)
            whole += panel_bytes(mode, other, depth)
        if bias:
            m, n = (other, rows) if whole_is_a else (rows, other)
            add_bias(f32(corner), ldc, f32(bias + 4 * first if whole_is_a else bias), m, n)
    tiles.release_tiles(unit)


# ---- the ops -----------------------------------------------------------------------------------


def make_product(x: Operand, y: Operand, threads: int) -> Product:
    """Return the product of two operands, in bf16 if one of them is."""
    return Product(x, y, tiles.choose_mode("bf16" if HALVES in (x.form, y.form) else "f32"), threads)


def make_operands(x: Array, w: Array, across: int) -> tuple[Operand, Operand]:
    """Return x (..., m, k) and w (..., n, k), or across (..., k, n), as operands.

    If w has no leading axes, all rows of x are multiplied at once.
    """
    (*x_lead, m, k), (*w_lead, n, last) = x.shape, w.shape
    n = last if across else n
    if prod(w_lead) == 1:
        m, x_lead, w_lead = m * prod(x_lead), [], []
    return Operand(x, 0, m, k, tuple(x_lead)), Operand(w, across, n, k, tuple(w_lead))


def matmul_plan(ins: Sequence[Any], threads: int) -> Product:
    """Return the plan of x wᵀ."""
    x, w, *_ = ins
    return make_product(*make_operands(x, w, across=0), threads)


def prefer_thin(made: Product) -> Product | ThinPlan:
    """Return the plan of a product, or a better one if an axis is short."""
    return choose_thin(made.a, made.b, made.threads) or made


def choose_matmul(ins: Sequence[Any], threads: int) -> Product | GemvPlan | ThinPlan:
    """Return the plan of x wᵀ, or one without packing for few rows or a short axis."""
    x, w, *bias = ins
    made = matmul_plan(ins, threads)
    if made.lead or made.a.count > MAX_ROWS or not made.a.k:
        return made if bias else prefer_thin(made)
    return GemvPlan(x, w, made.mode != tiles.FLOAT32, threads)


def matmul_nn_plan(ins: Sequence[Any], threads: int) -> Product | ThinPlan:
    """Return the plan of y w."""
    y, w = ins
    return prefer_thin(make_product(*make_operands(y, w, across=1), threads))


def int8_product(x: Array, w: Array, across: int, threads: int) -> Product:
    """Return the product of activations and a weight, rounded to 8-bit integers; dy w is rounded at random."""
    a, b = make_operands(x, w, across)
    return Product(replace(a, at_random=bool(across)), b, INT8, threads)


def int8_plan(ins: Sequence[Any], threads: int) -> Product:
    """Return the plan of x wᵀ in 8-bit integers."""
    x, w, *_ = ins
    return int8_product(x, w, 0, threads)


def int8_nn_plan(ins: Sequence[Any], threads: int) -> Product:
    """Return the plan of y w in 8-bit integers."""
    y, w = ins
    return int8_product(y, w, 1, threads)


def out_prod_plan(ins: Sequence[Any], threads: int) -> Product | ThinPlan:
    """Return the plan of aᵀ b."""
    a, b = (Operand(x, 1, x.shape[-1], x.shape[-2], tuple(x.shape[:-2])) for x in ins)
    return prefer_thin(make_product(a, b, threads))


def takes(outs: Sequence[Array], ins: Sequence[Array], attrs: dict[str, Any]) -> bool:
    """Return True for a float32 result and sources that products can pack."""
    return outs[0].dtype == np.float32 and all(can_pack(x) for x in ins)


def takes_int8(outs: Sequence[Array], ins: Sequence[Array], attrs: dict[str, Any]) -> bool:
    """Return True if this processor multiplies 8-bit integers, too."""
    return has_int8_products() and takes(outs, ins, attrs)


def register(op: str, plan: Any, takes: Any = takes) -> None:
    """Register the kernel of a product by its plan."""

    def scratch(outs: Sequence[Array], ins: Sequence[Array], attrs: dict[str, Any], threads: int) -> int:
        return int(plan(ins, threads).scratch) if prod(outs[0].shape) else 0

    @kernel(op, scratch, takes)
    def bind(
        outs: Sequence[np.ndarray], ins: Sequence[np.ndarray], attrs: Any, scratch: np.ndarray, threads: int
    ) -> list[Call]:
        _x, _w, *bias = ins
        return (
            plan(ins, threads).calls(outs[0], scratch, **({"bias": bias[0]} if bias else {}))
            if outs[0].size
            else []
        )


def register_sum(op: str, plan: Any) -> None:
    """Register the kernel of a product that is added to the first source."""

    def scratch(outs: Sequence[Array], ins: Sequence[Array], attrs: dict[str, Any], threads: int) -> int:
        return int(plan(ins[1:], threads).scratch) if prod(outs[0].shape) else 0

    @kernel(op, scratch, takes)
    def bind(
        outs: Sequence[np.ndarray], ins: Sequence[np.ndarray], attrs: Any, scratch: np.ndarray, threads: int
    ) -> list[Call]:
        (y,), (start, *factors) = outs, ins
        if not y.size:
            return []
        is_there = y.ctypes.data == start.ctypes.data
        copying = [] if is_there else copy_calls([(as_columns(start), as_columns(y))], [y.shape[-1]], False)
        return [*copying, *plan(factors, threads).calls(y, scratch, accumulate=True)]


register("matmul", choose_matmul)
register("matmul_nn", matmul_nn_plan)
register("out_prod", out_prod_plan)
register_sum("matmul_add", choose_matmul)
register_sum("matmul_nn_add", matmul_nn_plan)
register("matmul_int8", int8_plan, takes_int8)
register("matmul_nn_int8", int8_nn_plan, takes_int8)
