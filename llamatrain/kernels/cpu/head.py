"""The output head and its loss in one: sum of weights * (logsumexp(x wᵀ) - (x wᵀ)[target]), and its gradients in the same pass.

Tokens go in chunks, so that only a chunk's logits are ever held. For each chunk: the products, slice by slice of the vocabulary,
each turning its columns into exponentials relative to the largest of them while they are in the cache, and summing these; then
each row puts its slices' sums together and scales them to the gradient; then dx = dlogits w and dw += dlogitsᵀ x.
In bf16 the kept exponentials and the gradient are bf16; logits, maxima, sums and the loss are not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from llamatrain.kernels.cpu import tiles
from llamatrain.kernels.cpu.binding import Array, kernel
from llamatrain.kernels.cpu.products import K_BLOCK, Operand, Product, pack_call, pack_part, packs
from llamatrain.kernels.cpu.quantised import ROOM
from llamatrain.kernels.cpu.softmax import top_of
from llamatrain.kernels.cpu.sums import add_up
from llamatrain.machine.entry import Call, Entry, f32, f64, i32, u16
from llamatrain.machine.jit import inline
from llamatrain.machine.simd.memory import load, load_to, store, store_to
from llamatrain.machine.simd.vector import LANES, exp, splat, to_bf16, total, within

ZERO = np.float32(0)

LOGITS = 33 << 20  # bytes of logits that may be held
ROWS = 512  # tokens in a chunk, at most
LINE = 64  # bytes to which each part of the scratch memory is aligned
COLUMNS, FEW = 128, 32  # of the vocabulary in a slice; in a small vocabulary


@dataclass(frozen=True)
class Head:
    x: Any  # (N, D)
    w: Any  # (V, D)
    dx: bool
    dw: bool
    mode: int
    threads: int

    @property
    def half(self) -> int:
        return int(self.mode != tiles.FLOAT32)

    @property
    def keeps(self) -> bool:
        return self.dx or self.dw

    @property
    def vocabulary(self) -> int:
        return int(self.w.shape[0])

    @property
    def pitch(self) -> int:
        """Elements from a row of logits to the next: whole lines, an odd number of them, which spreads rows over the cache."""
        return int(ceil(self.vocabulary / 32) | 1) * 32

    @property
    def rows(self) -> int:
        fit = LOGITS // (self.pitch * (2 if self.half else 4)) // 32 * 32
        return min(ROWS, max(1, self.x.shape[0]), max(32, fit) if self.keeps else ROWS)

    @property
    def columns(self) -> int:
        """Of a slice; sums are cut there, so the number of threads may not change it."""
        return COLUMNS if self.vocabulary > 32 * COLUMNS else FEW

    @property
    def slices(self) -> int:
        return ceil(self.vocabulary / self.columns)

    def packed(self, count: int, k: int) -> int:
        return tiles.packed_bytes(self.mode, count, k)

    @property
    def block(self) -> int:
        return min(int(self.x.shape[1]), K_BLOCK)

    @property
    def slice_bytes(self) -> int:
        """What a thread needs: its slice of w, packed, the logits of that, and room to decode."""
        return self.packed(self.columns, self.block) + self.rows * self.columns * 4 + self.side.room

    @property
    def side(self) -> Operand:
        v, d = self.w.shape
        return Operand(self.w, 0, v, d)

    @property
    def chunk_bytes(self) -> int:
        return self.packed(self.rows, self.block) * ceil(self.x.shape[1] / self.block)

    def dx_product(self, logits: Any, rows: int) -> Product:
        v, d = self.w.shape
        return Product(Operand(logits, 0, rows, v, apart=self.pitch), Operand(self.w, 1, d, v), self.mode, self.threads)

    def dw_product(self, logits: Any, x: Any, rows: int) -> Product:
        v, d = self.w.shape
        return Product(Operand(logits, 1, v, rows, apart=self.pitch), Operand(x, 1, d, rows), self.mode, self.threads)

    def parts(self) -> dict[str, tuple[int, Any]]:
        """What lies in the scratch memory: elements and their type."""
        kept = np.empty(0, np.uint16 if self.half else np.float32)
        work = [self.chunk_bytes + self.threads * self.slice_bytes]
        for rows in {self.rows, self.x.shape[0] % self.rows}:  # the last chunk may be cut in another way
            work += [self.dx_product(kept, rows).scratch] if self.dx and rows else []
            work += [self.dw_product(kept, self.x, rows).scratch] if self.dw else []
        return {
            "logits": (self.rows * self.pitch * self.keeps, kept.dtype),
            "partial": (self.slices * self.rows * 2, np.float32),
            "chosen": (self.rows, np.float32),
            "losses": (max(1, self.x.shape[0]), np.float64),
            "work": (max(work), np.uint8),
        }

    @property
    def scratch(self) -> int:
        return sum(ceil(count * np.dtype(dtype).itemsize / LINE) * LINE for count, dtype in self.parts().values())


def divide(scratch: np.ndarray, parts: dict[str, tuple[int, Any]]) -> dict[str, np.ndarray]:
    arrays, start = {}, 0
    for name, (count, dtype) in parts.items():
        size = count * np.dtype(dtype).itemsize
        arrays[name] = scratch[start : start + size].view(dtype)
        start += ceil(size / LINE) * LINE
    return arrays


def head_calls(
    head: Head, outs: Sequence[np.ndarray], ins: Sequence[np.ndarray], dloss: np.ndarray, scratch: np.ndarray
) -> list[Call]:
    x, w, targets, weights = ins
    loss, *gradients = outs
    dx, dw = gradients.pop(0) if head.dx else None, gradients.pop(0) if head.dw else None
    count, (v, d) = x.shape[0], w.shape
    part, calls = divide(scratch, head.parts()), []
    logits, work = part["logits"], part["work"]
    for first in range(0, max(1, count), head.rows):
        here = slice(first, min(count, first + head.rows))
        chunk, rows = x[here], len(x[here])
        sides = Operand(chunk, 0, rows, d), head.side
        left, right = (side.words(head.mode, 0, d, head.block) for side in sides)
        calls.append(pack_call(sides[0], left, np.zeros(1, np.int64), work, 0, True, 0, 0))
        shape = (rows, head.half, int(head.keeps), head.pitch, logits, part["partial"], part["chosen"], targets[here])
        spaces = (head.chunk_bytes, head.slice_bytes, head.packed(head.columns, head.block))
        calls.append(logits_slices.call(*right, head.columns, *shape, work, *spaces, items=head.slices, block=1))
        ends = (weights[here], dloss, part["losses"][here])
        calls.append(finish_rows.call(v, head.slices, head.columns, *shape, *ends, items=rows, block=ceil(8192 / v)))
        if dx is not None and rows:
            calls += head.dx_product(logits, rows).calls(dx[here], work)
        if dw is not None:
            calls += head.dw_product(logits, chunk, rows).calls(dw, work, accumulate=first > 0)
    return [*calls, add_up.call(part["losses"], loss, count, 1.0, items=1, block=1)]


# ---- compiled ----------------------------------------------------------------------------------


@inline
def exponentials(line, to, width, top):
    """exp(logit - top), rounded where `to` is bf16, and the sum of them before that."""
    so_far, whole = splat(ZERO), width // LANES * LANES
    for i in range(0, whole, LANES):
        value = exp(load(line, i) - top)
        so_far += value
        store(to, i, value)
    if whole < width:
        value = within(exp(load_to(line, whole, width) - top), whole, 0, width, ZERO)
        so_far += value
        store_to(to, whole, width, value, 0)
    return total(so_far)


@Entry
def logits_slices(lo, hi, thread, a):
    mode, w, form, stride, v, d, block = a[0], a[1], a[2], a[4], a[5], a[6], a[9]
    width, rows, half, keeps, pitch, logits = a[10], a[11], a[12], a[13], a[14], a[15]
    partial, chosen, targets, packed = f32(a[16]), f32(a[17]), i32(a[18]), a[19]
    mine = packed + a[20] + thread * a[21]
    own, decoding = mine + a[22], mine + a[21] - ROOM  # only quantised weights have that
    tiles.begin(mode)
    for item in range(lo, hi):
        first, whole = item * width, packed
        columns = min(width, v - first)
        for k0 in range(0, d, block):
            deep = min(block, d - k0)
            pack_part(mode, mine, w, form, 0, 1, stride, first, columns, k0, deep, decoding)
            tiles.multiply(mode, own, width, whole, mine, rows, columns, deep, k0 > 0, 1)
            whole += tiles.panel_bytes(mode, rows, deep)
        for row in range(rows):
            line, place, at = f32(own + row * width * 4), row * pitch + first, (item * rows + row) * 2
            top = top_of(line, 0, columns)
            if first <= targets[row] < first + columns:
                chosen[row] = line[targets[row] - first]
            if keeps and half:
                rest = exponentials(line, u16(logits + place * 2), columns, top)
            else:
                rest = exponentials(line, f32(logits + place * 4) if keeps else line, columns, top)
            partial[at], partial[at + 1] = top, rest
    tiles.end(mode)


@inline
def log_sum(partial, row, rows, slices):
    """The logarithm of a row's sum of exponentials, from those of its slices."""
    top, so_far = partial[row * 2], 0.0
    for item in range(slices):
        top = max(top, partial[(item * rows + row) * 2])
    for item in range(slices):
        at = (item * rows + row) * 2
        so_far += partial[at + 1] * math.exp(partial[at] - top)
    return top + math.log(so_far)


@inline
def turn_slice(line, first, end, factor):
    for i in range(first, end, LANES):
        store_to(line, i, end, load_to(line, i, end) * factor if factor != 0 else splat(ZERO), 0)


@Entry
def finish_rows(lo, hi, thread, a):
    v, slices, width, rows, half, keeps, pitch, logits = a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]
    partial, chosen, targets = f32(a[8]), f32(a[9]), i32(a[10])
    weights, dloss, losses = f32(a[11]), f32(a[12]), f64(a[13])
    for row in range(lo, hi):
        target = targets[row] if weights[row] != 0 else -1
        less = log_sum(partial, row, rows, slices)
        losses[row] = weights[row] * (less - chosen[row]) if target >= 0 else 0.0
        if target >= v:  # shows in the loss, and writes to no foreign memory
            losses[row], target = math.nan, -1
        factor = weights[row] * dloss[0] if target >= 0 else ZERO
        here, at_target = logits + row * pitch * (2 if half else 4), factor * np.float32(math.exp(chosen[row] - less) - 1)
        for item in range(slices if keeps else 0):
            first, relative = item * width, np.float32(partial[(item * rows + row) * 2] - less)
            scale = factor * exp(relative) if target >= 0 else ZERO
            if half:
                turn_slice(u16(here), first, min(v, first + width), scale)
            else:
                turn_slice(f32(here), first, min(v, first + width), scale)
        if keeps and target >= 0 and half:
            u16(here)[target] = to_bf16(at_target)
        elif keeps and target >= 0:
            f32(here)[target] = at_target


# ---- the ops -----------------------------------------------------------------------------------


def head_of(ins: Sequence[Any], dx: bool, dw: bool, threads: int) -> Head:
    x, w, *_ = ins
    mode = tiles.mode_of("bf16" if np.uint16 in (x.dtype, w.dtype) else "f32")
    return Head(x, w, dx, dw, mode, threads)


def back_of(ins: Sequence[Any], attrs: dict[str, Any], threads: int) -> Head:
    return head_of(ins[1:], attrs["dx"], attrs["dw"], threads)


def takes(outs: Sequence[Array], ins: Sequence[Array], attrs: dict[str, Any]) -> bool:
    *_, x, w, targets, weights = ins
    gives = all(out.dtype == np.float32 for out in (*outs, weights))
    return gives and targets.dtype == np.int32 and packs(x) and packs(w)


@kernel("linear_cross_entropy", lambda outs, ins, attrs, threads: head_of(ins, False, False, threads).scratch, takes)
def linear_cross_entropy(outs, ins, attrs, scratch, threads):
    return head_calls(head_of(ins, False, False, threads), outs, ins, np.ones((), np.float32), scratch)


@kernel("linear_cross_entropy_back", lambda outs, ins, attrs, threads: back_of(ins, attrs, threads).scratch, takes)
def linear_cross_entropy_back(outs, ins, attrs, scratch, threads):
    dloss, *sources = ins
    return head_calls(back_of(ins, attrs, threads), outs, sources, dloss, scratch)
