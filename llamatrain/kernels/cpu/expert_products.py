"""Products of choices with the weights of their experts (graph/ops/experts.py).

First all threads pack the choices, sorted by expert, in panels of 16 that belong to one expert each. Then a job
takes some columns of one expert's result: it packs that part of the weight once, if the expert has a choice at all,
and multiplies all its choices with it. How many these are is read when the job runs. If there are more choices than
should be packed at once, this is repeated for the next ones. No sum is split between jobs, so the number of threads
changes no bits. If experts have very few choices on average, each row of a weight is decoded and multiplied with them,
and nothing is packed. Which of both is done depends on the shapes alone, so that a choice's result does not depend on
the other choices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from llamatrain.compiler.declare import I32, Call, KernelEntry, f32, inline, u16
from llamatrain.compiler.vectors import LANES, splat, store_until
from llamatrain.gguf.quants.kinds import BF16, F32
from llamatrain.kernels.cpu import tiles
from llamatrain.kernels.cpu.dequantize import decode
from llamatrain.kernels.cpu.gemv import MAX_ROWS, dot
from llamatrain.kernels.cpu.matmul import largest_slice, takes, takes_int8
from llamatrain.kernels.cpu.pack import (
    BLOCKS,
    HALVES,
    INT8,
    Operand,
    Side,
    multiply,
    pack_part,
    panel_bytes,
)
from llamatrain.kernels.cpu.registry import kernel
from llamatrain.kernels.cpu.tile_shape import INT8_BY_TILES
from llamatrain.kernels.quantized import Blocks

PANEL = 16  # choices of one expert in a packed panel
MAX_PACKED_BYTES = 32 << 20  # of choices at a time
LINE = 64


class Group(NamedTuple):
    """Sorted choices that are packed at a time, and the most panels that they fill."""

    first: int
    end: int
    panels: int


class Scratch(NamedTuple):
    """Memory: packed choices, and for each thread a packed part of a weight, copied choices, and a slab to decode."""

    choices: Any
    own: Any
    thread_bytes: int
    copied: int  # offsets in a thread's memory
    slab: int


def choose_mode(a: Any, b: Any) -> int:
    """Return the mode of a product: bf16 if a source is."""
    return tiles.choose_mode("bf16" if np.uint16 in (a.dtype, b.dtype) else "f32")


def packed_bytes(mode: int, count: int, k: int) -> int:
    """Return the bytes of packed rows, for plans."""
    return panel_bytes(mode, count, k) if mode == INT8 else tiles.packed_bytes(mode, count, k)


@dataclass(frozen=True)
class ExpertProduct:
    """The plan of x wᵀ, or with `across` of x w, for choices x and a stack of weights w."""

    x: Any  # (rows, k) or choices (rows, used, k)
    w: Any  # (experts, n, k), or across (experts, k, n)
    order: Any
    across: int
    mode: int
    threads: int

    @property
    def weight(self) -> Operand:
        """The weight of one expert."""
        _, rows, columns = self.w.shape
        n, k = (columns, rows) if self.across else (rows, columns)
        return Operand(self.w, self.across, n, k)

    @property
    def choices(self) -> Operand:
        """The choices, as if they were sorted rows."""
        at_random = self.mode == INT8 and bool(self.across)
        return Operand(self.x, 0, self.order.size, self.x.shape[-1], at_random=at_random)

    @property
    def used(self) -> int:
        """The number of choices of a row that x has once; 0 if x has all choices."""
        return int(self.order.shape[1]) if len(self.x.shape) == 2 else 0

    @cached_property
    def k_block(self) -> int:
        """The length of a block of k."""
        return max(1, min(self.weight.k, largest_slice(self.mode).k))

    @property
    def few(self) -> bool:
        """True if no choices are packed, because experts have few of them on average."""
        return not self.across and self.mode != INT8 and self.order.size <= MAX_ROWS * self.w.shape[0]

    @property
    def blocks(self) -> int:
        """The number of blocks of k."""
        return max(1, ceil(self.weight.k / self.k_block))

    def panels(self, choices: int) -> int:
        """Return the most panels that choices can fill: experts may leave their last ones partly empty."""
        return int(choices // PANEL + min(choices, self.w.shape[0]))

    @cached_property
    def group_size(self) -> int:
        """The number of choices that are packed at a time."""
        panel = self.blocks * packed_bytes(self.mode, PANEL, self.k_block)
        return int(min(self.order.size, PANEL * max(1, MAX_PACKED_BYTES // panel)))

    @property
    def groups(self) -> list[Group]:
        """The choices that are packed one after the other."""
        starts, count = range(0, self.order.size, self.group_size), self.order.size
        ends = (min(count, start + self.group_size) for start in starts)
        return [Group(start, end, self.panels(end - start)) for start, end in zip(starts, ends, strict=True)]

    @cached_property
    def width(self) -> int:
        """The columns of a job."""
        unit, most = self.weight.cut_unit, largest_slice(self.mode).rows
        return unit * min(ceil(most / unit), ceil(self.weight.count / unit))

    @property
    def expert_bytes(self) -> int:
        """The bytes of one expert's weight."""
        _, rows, columns = self.w.shape
        row_bytes = self.w.row_bytes if isinstance(self.w, Blocks) else columns * self.w.dtype.itemsize
        return int(rows * row_bytes)

    @property
    def choices_bytes(self) -> int:
        """The bytes of packed choices."""
        return self.blocks * packed_bytes(self.mode, PANEL * self.panels(self.group_size), self.k_block)

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """The bytes of the parts of a thread's memory."""
        k = self.weight.k
        row, few = (0, 0) if self.across else (4 * k, 4 * k * MAX_ROWS)  # of a weight, and of few choices
        return (
            max(packed_bytes(self.mode, self.width, self.k_block), ceil(row / LINE) * LINE),
            ceil(max(few, 4 * PANEL * self.k_block) / LINE) * LINE,
            max(each.slab_bytes(self.mode) for each in (self.weight, self.choices)),
        )

    @property
    def scratch(self) -> int:
        """The bytes of scratch memory."""
        return self.choices_bytes + self.threads * sum(self.parts)

    def calls(self, y: np.ndarray, scratch: np.ndarray, ends: np.ndarray) -> list[Call]:
        """Return the calls that compute y."""
        part, copied, _slab = self.parts
        own = scratch[self.choices_bytes :]
        memory = Scratch(scratch, own, sum(self.parts), part, part + copied)
        every = {"order": self.order, "ends": ends, "used": self.used}
        left, right = (
            each.to_side(self.mode, 0, self.weight.k, self.k_block) for each in (self.choices, self.weight)
        )
        made = []
        for group in self.groups:
            if not self.few:
                made.append(
                    pack_choices.call(
                        left,
                        **every,
                        group=group,
                        scratch=memory,
                        experts=len(ends),
                        items=group.panels,
                        block=1,
                    )
                )
            made.append(
                multiply_experts.call(
                    left,
                    right,
                    expert_bytes=self.expert_bytes,
                    **every,
                    group=group,
                    few=int(self.few),
                    y=y,
                    width=self.width,
                    scratch=memory,
                    items=len(ends) * ceil(self.weight.count / self.width),
                    block=1,
                )
            )
        return made


# ---- compiled ----------------------------------------------------------------------------------


@inline
def first_place(ends, expert):
    """Return the place of an expert's first choice."""
    return ends[expert - 1] if expert > 0 else 0


@inline
def first_in_group(ends, expert, group):
    """Return the place of an expert's first choice in a group, or the group's end."""
    return min(max(first_place(ends, expert), group.first), group.end)


@inline
def count_in_group(ends, expert, group):
    """Return the number of an expert's choices in a group."""
    return min(max(ends[expert], group.first), group.end) - first_in_group(ends, expert, group)


@inline
def panels_in_group(ends, expert, group):
    """Return the number of panels of an expert in a group."""
    return (count_in_group(ends, expert, group) + PANEL - 1) // PANEL


@inline
def element_bytes(form):
    """Return the bytes of an element of a source that is not quantized."""
    return 2 if form == HALVES else 4


@inline
def source_row(order, used, place):
    """Return the row of x that has the choice at a place."""
    return order[place] // used if used else place


@inline
def copy_rows(to, half, side, order, used, place, count, start, length):
    """Copy a part of each choice's row, in the type of the product."""
    kind, size = BF16 if side.form == HALVES else F32, element_bytes(side.form)
    for i in range(count):
        row = side.source + (source_row(order, used, place + i) * side.stride + start) * size
        decode(kind, to + i * length * (2 if half else 4), half, row, length)


@inline
def first_panel(ends, expert, group):
    """Return the number of panels before an expert's."""
    panels = 0
    for each in range(expert):
        panels += panels_in_group(ends, each, group)
    return panels


@inline
def pack_panel(side, to, copied, order, used, place, count, start, depth, slab):
    """Pack a panel. Rows that stand for several choices are copied first."""
    if not used:
        pack_part(side, to, side.source, 0, place, count, start, depth, slab)
        return
    half = 1 if side.form == HALVES else 0
    size = element_bytes(side.form)
    copy_rows(copied, half, side, order, used, place, count, start, depth)
    beginning = copied - (place * depth + start) * size  # where row 0 would be
    rows = Side(
        side.mode, beginning, side.form, 0, depth, side.rows, depth, 0, depth, side.k_block, side.at_random
    )
    pack_part(rows, to, beginning, 0, place, count, start, depth, slab)


@KernelEntry
def pack_choices(
    lo, hi, thread, left: Side, order: I32, ends: I32, used, group: Group, scratch: Scratch, experts
):
    """Pack panels lo to hi of a group of choices, those that there are."""
    memory = scratch.own + thread * scratch.thread_bytes
    copied, slab = memory + scratch.copied, memory + scratch.slab
    expert, before, here = 0, 0, panels_in_group(ends, 0, group)  # panels of earlier experts, and of this one
    for panel in range(lo, hi):
        while expert < experts - 1 and panel >= before + here:
            before, expert = before + here, expert + 1
            here = panels_in_group(ends, expert, group)
        done = (panel - before) * PANEL
        place = first_in_group(ends, expert, group) + done
        count = min(PANEL, count_in_group(ends, expert, group) - done)
        for k0 in range(0, left.depth if count > 0 else 0, left.k_block):
            depth = min(left.k_block, left.depth - k0)
            to = scratch.choices + panel_bytes(left.mode, PANEL, left.k_block) * group.panels * (
                k0 // left.k_block
            )
            to += panel_bytes(left.mode, PANEL, depth) * panel
            pack_panel(left, to, copied, order, used, place, count, k0, depth, slab)


@inline
def multiply_few(left, right, weight, order, used, place, count, y, first, columns, memory, copied):
    """Compute some columns of a few choices: each row of the weight is decoded, and multiplied with all of them."""
    half, k, n = 1 if right.mode != tiles.FLOAT32 else 0, right.k, right.rows
    size = 2 if half else 4
    copy_rows(copied, half, left, order, used, place, count, 0, k)
    kind = right.form - BLOCKS if right.form >= BLOCKS else BF16 if right.form == HALVES else F32
    row_bytes = right.stride if right.form >= BLOCKS else right.stride * element_bytes(right.form)
    for column in range(first, first + columns):
        decode(kind, memory, half, weight + column * row_bytes, k)
        for i in range(count):
            row = copied + i * k * size
            result = dot(u16(row), u16(memory), k) if half else dot(f32(row), f32(memory), k)
            f32(y)[(place + i) * n + column] = result


@KernelEntry
def multiply_experts(
    lo,
    hi,
    thread,
    left: Side,
    right: Side,
    expert_bytes,
    order: I32,
    ends: I32,
    used,
    group: Group,
    few,
    y,
    width,
    scratch: Scratch,
):
    """Compute parts lo to hi: some columns of one expert's choices each."""
    mode, n = right.mode, right.rows
    slices = (n + width - 1) // width
    memory = scratch.own + thread * scratch.thread_bytes
    copied, slab = memory + scratch.copied, memory + scratch.slab
    unit = tiles.TILES if INT8_BY_TILES and mode == INT8 else mode
    tiles.configure_tiles(unit)
    for item in range(lo, hi):
        expert, first = item // slices, item % slices * width
        place, columns = first_in_group(ends, expert, group), min(width, n - first)
        count, weight = count_in_group(ends, expert, group), right.source + expert * expert_bytes
        if few:
            for done in range(0, count, MAX_ROWS):
                rows = min(MAX_ROWS, count - done)
                multiply_few(
                    left, right, weight, order, used, place + done, rows, y, first, columns, memory, copied
                )
        elif count > 0:
            panel, corner = first_panel(ends, expert, group), y + (place * n + first) * 4
            for k0 in range(0, max(1, right.depth), right.k_block):
                depth, more = min(right.k_block, right.depth - k0), 1 if k0 > 0 else 0
                packed = scratch.choices + panel_bytes(mode, PANEL, depth) * panel
                packed += panel_bytes(mode, PANEL, right.k_block) * group.panels * (k0 // right.k_block)
                pack_part(right, memory, weight, 1 - right.across, first, columns, k0, depth, slab)
                multiply(mode, corner, n, packed, memory, count, columns, depth, more, 1)
    tiles.release_tiles(unit)


# ---- sums over an expert's choices -------------------------------------------------------------

SUM_ROWS, SUM_COLUMNS, SUM_CHOICES = 128, 256, 512  # of a part of the result, and of the choices that it sums


class SumScratch(NamedTuple):
    """A thread's memory: two packed parts of sources, and copied rows."""

    memory: Any
    thread_bytes: int
    packed: int  # offsets
    copied: int


@dataclass(frozen=True)
class ExpertSums:
    """The plan of aᵀ b of each expert's choices."""

    a: Any  # (rows, n) or choices (rows, used, n)
    b: Any  # (rows, k) or choices (rows, used, k)
    order: Any
    threads: int

    @property
    def mode(self) -> int:
        """The mode of the product."""
        return choose_mode(self.a, self.b)

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """The bytes of the parts of a thread's memory."""
        columns = max(SUM_ROWS, SUM_COLUMNS)
        sizes = (packed_bytes(self.mode, count, SUM_CHOICES) for count in (SUM_ROWS, SUM_COLUMNS))
        return (*sizes, 4 * SUM_CHOICES * columns)

    @property
    def scratch(self) -> int:
        """The bytes of scratch memory."""
        return self.threads * sum(self.parts)

    def side(self, x: Any) -> Side:
        """Return a source as an argument: its rows are interleaved, as they are summed over."""
        width = x.shape[-1]
        return Operand(x, 1, width, self.order.size).to_side(self.mode, 0, self.order.size, SUM_CHOICES)

    def calls(self, c: np.ndarray, scratch: np.ndarray, ends: np.ndarray) -> list[Call]:
        """Return the call that computes the sums."""
        left, right, _copied = self.parts
        memory = SumScratch(scratch, sum(self.parts), left, left + right)
        used = self.order.shape[1]
        return [
            sum_products.call(
                left=self.side(self.a),
                right=self.side(self.b),
                order=self.order,
                ends=ends,
                left_used=used if len(self.a.shape) == 2 else 0,
                right_used=used if len(self.b.shape) == 2 else 0,
                c=c,
                scratch=memory,
                items=len(ends) * ceil(self.a.shape[-1] / SUM_ROWS),
                block=1,
            )
        ]


@inline
def pack_columns(side, to, is_a, copied, order, used, place, count, first, columns):
    """Pack columns of `count` choices from a place on, over which a product sums."""
    size = element_bytes(side.form)
    source, stride = side.source + (place * side.rows + first) * size, side.rows
    if used:
        kind = BF16 if side.form == HALVES else F32
        for i in range(count):
            row = side.source + (source_row(order, used, place + i) * side.rows + first) * size
            decode(kind, copied + i * columns * size, 1 if side.form == HALVES else 0, row, columns)
        source, stride = copied, columns
    if is_a:
        tiles.pack_a(side.mode, to, source, side.form, 1, stride, columns, count)
    else:
        tiles.pack_b(side.mode, to, source, side.form, 1, stride, columns, count)


@KernelEntry
def sum_products(
    lo,
    hi,
    thread,
    left: Side,
    right: Side,
    order: I32,
    ends: I32,
    left_used,
    right_used,
    c,
    scratch: SumScratch,
):
    """Compute parts lo to hi: some rows of one expert's sum each, which is zero without choices."""
    mode, n, k = left.mode, left.rows, right.rows
    slices = (n + SUM_ROWS - 1) // SUM_ROWS
    memory = scratch.memory + thread * scratch.thread_bytes
    packed, copied = memory + scratch.packed, memory + scratch.copied
    tiles.configure_tiles(mode)
    for item in range(lo, hi):
        expert, first = item // slices, item % slices * SUM_ROWS
        start, end, rows = first_place(ends, expert), ends[expert], min(SUM_ROWS, n - first)
        corner = c + (expert * n + first) * k * 4
        if end == start:
            for i in range(0, rows * k, LANES):
                store_until(f32(corner), i, rows * k, splat(np.float32(0)), 0)
        for place in range(start, end, SUM_CHOICES):
            count = min(SUM_CHOICES, end - place)
            pack_columns(left, memory, True, copied, order, left_used, place, count, first, rows)
            for j in range(0, k, SUM_COLUMNS):
                columns = min(SUM_COLUMNS, k - j)
                pack_columns(right, packed, False, copied, order, right_used, place, count, j, columns)
                more = 1 if place > start else 0
                multiply(mode, corner + j * 4, k, memory, packed, rows, columns, count, more, 1)
    tiles.release_tiles(mode)


# ---- the ops -----------------------------------------------------------------------------------


def product_plan(across: int) -> Any:
    """Return the rule that makes the plan of a product from its sources."""

    def plan(ins: Sequence[Any], threads: int) -> ExpertProduct:
        x, w, order, _ends = ins
        return ExpertProduct(x, w, order, across, choose_mode(x, w), threads)

    return plan


def int8_plan(across: int) -> Any:
    """Return the rule that makes the plan of a product in 8-bit integers."""

    def plan(ins: Sequence[Any], threads: int) -> ExpertProduct:
        x, w, order, _ends = ins
        return ExpertProduct(x, w, order, across, INT8, threads)

    return plan


def sums_plan(ins: Sequence[Any], threads: int) -> ExpertSums:
    """Return the plan of sums over choices."""
    a, b, order, _ends = ins
    return ExpertSums(a, b, order, threads)


def register(op: str, plan: Any, takes: Any = takes) -> None:
    """Register the kernel of a product by its plan."""

    def takes_sources(outs, ins, attrs) -> bool:
        return takes(outs, ins[:2], attrs)

    def scratch_bytes(outs, ins, attrs, threads) -> int:
        return plan(ins, threads).scratch if outs[0].size else 0

    @kernel(op, scratch_bytes, takes_sources)
    def bind(outs, ins, attrs, scratch, threads):
        return plan(ins, threads).calls(outs[0], scratch, ins[3]) if outs[0].size else []


register("expert_matmul", product_plan(across=0))
register("expert_matmul_nn", product_plan(across=1))
register("expert_out_prod", sums_plan)
register("expert_matmul_int8", int8_plan(across=0), takes_int8)
register("expert_matmul_nn_int8", int8_plan(across=1), takes_int8)
