"""The output head fused with its loss: sum of weights * (logsumexp(x wᵀ) - (x wᵀ)[target]), with gradients in the same pass.

Tokens are processed in chunks, so that only a chunk's logits exist. For each chunk: the products, slice by
slice of the vocabulary; each slice turns its columns into exponentials relative to their maximum while they
are in the cache, and sums them. Then each row combines its slices' sums and scales the slices to the
gradient. Then dx = dlogits w and dw += dlogitsᵀ x. With a cap, the stored exponentials include the cap's
slope 1 - (c / cap)², the sums do not. In bf16, stored exponentials and the gradient are bf16; logits, maxima,
sums and the loss are not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from llamatrain.compiler.declare import F32, F64, Call, KernelEntry
from llamatrain.kernels.cpu import tiles
from llamatrain.kernels.cpu.fused_ce_tiles import Chunk, finish_rows, logits_slices, mark_correct_rows
from llamatrain.kernels.cpu.matmul import Product, largest_slice
from llamatrain.kernels.cpu.pack import Operand, Packed, can_pack, pack_call
from llamatrain.kernels.cpu.reduce import add_up
from llamatrain.kernels.cpu.registry import Array, kernel

MAX_LOGIT_BYTES = 33 << 20  # the most bytes of logits
MAX_CHUNK_ROWS = 512  # the most tokens in a chunk
EVAL_BLOCK, COPY_BLOCK = 64, 4096  # tokens in a block
LINE = 64  # the alignment of each part of the scratch memory
MIN_SLICE = 32  # columns of a slice of a small vocabulary


@dataclass(frozen=True)
class FusedLoss:
    """The sizes and the plan of a fused output head."""

    x: Any  # (N, D)
    w: Any  # (V, D)
    dx: bool
    dw: bool
    mode: int
    threads: int
    counts_correct: bool = False
    per_row: bool = False  # returns the loss of each row
    cap: float = 0.0  # the cap of logits; 0: none

    @property
    def half(self) -> int:
        """1 if products are in bf16."""
        return int(self.mode != tiles.FLOAT32)

    @property
    def keeps_logits(self) -> bool:
        """True if gradients need the logits."""
        return self.dx or self.dw

    @property
    def vocabulary(self) -> int:
        """The number of logits of a row."""
        return int(self.w.shape[0])

    @property
    def pitch(self) -> int:
        """The elements from a row of logits to the next.

        It is an odd number of cache lines, which spreads rows over the cache.
        """
        return int(ceil(self.vocabulary / 32) | 1) * 32

    @property
    def rows(self) -> int:
        """The tokens in a chunk."""
        fit = MAX_LOGIT_BYTES // (self.pitch * (2 if self.half else 4)) // 32 * 32
        return min(
            MAX_CHUNK_ROWS, max(1, self.x.shape[0]), max(32, fit) if self.keeps_logits else MAX_CHUNK_ROWS
        )

    @property
    def columns(self) -> int:
        """The columns of a slice; sums are split there, so it must not depend on the number of threads."""
        many = largest_slice(self.mode).rows
        return many if self.vocabulary > 32 * many else MIN_SLICE

    @property
    def slices(self) -> int:
        """The number of slices."""
        return ceil(self.vocabulary / self.columns)

    def packed_bytes(self, count: int, k: int) -> int:
        """Return the bytes of a packed operand."""
        return tiles.packed_bytes(self.mode, count, k)

    @property
    def k_block(self) -> int:
        """The length of a block of k."""
        return min(int(self.x.shape[1]), largest_slice(self.mode).k)

    @property
    def slice_bytes(self) -> int:
        """The bytes of a thread: its packed slice of w, that slice's logits, and a slab to decode."""
        return (
            self.packed_bytes(self.columns, self.k_block)
            + self.rows * self.columns * 4
            + self.weight_operand.slab_bytes(self.mode)
        )

    @property
    def weight_operand(self) -> Operand:
        """The weight as an operand."""
        v, d = self.w.shape
        return Operand(self.w, 0, v, d)

    @property
    def chunk_bytes(self) -> int:
        """The bytes of a packed chunk of x."""
        return self.packed_bytes(self.rows, self.k_block) * ceil(self.x.shape[1] / self.k_block)

    def make_chunk(self, rows: int, part: dict[str, np.ndarray], targets: np.ndarray) -> Chunk:
        """Return a chunk's arguments for compiled code."""
        return Chunk(
            width=self.columns,
            rows=rows,
            half=self.half,
            keeps_logits=self.keeps_logits,
            pitch=self.pitch,
            logits=part["logits"],
            partial=part["partial"],
            chosen=part["chosen"],
            targets=targets,
            cap=self.cap,
        )

    def dx_product(self, logits: Any, rows: int) -> Product:
        """Return the product dx = dlogits w."""
        v, d = self.w.shape
        return Product(
            Operand(logits, 0, rows, v, row_stride=self.pitch),
            Operand(self.w, 1, d, v),
            self.mode,
            self.threads,
        )

    def dw_product(self, logits: Any, x: Any, rows: int) -> Product:
        """Return the product dw = dlogitsᵀ x."""
        v, d = self.w.shape
        return Product(
            Operand(logits, 1, v, rows, row_stride=self.pitch),
            Operand(x, 1, d, rows),
            self.mode,
            self.threads,
        )

    def scratch_parts(self) -> dict[str, tuple[int, Any]]:
        """Return the elements and type of each array in the scratch memory."""
        kept = np.empty(0, np.uint16 if self.half else np.float32)
        work = [self.chunk_bytes + self.threads * self.slice_bytes]
        for rows in {self.rows, self.x.shape[0] % self.rows}:  # the last chunk may be divided differently
            work += [self.dx_product(kept, rows).scratch] if self.dx and rows else []
            work += [self.dw_product(kept, self.x, rows).scratch] if self.dw else []
        return {
            "logits": (self.rows * self.pitch * self.keeps_logits, kept.dtype),
            "partial": (self.slices * self.rows * 2, np.float32),
            "chosen": (self.rows, np.float32),
            "losses": (max(1, self.x.shape[0]), np.float64),
            "right": (max(1, self.x.shape[0]) * self.counts_correct, np.float64),
            "work": (max(work), np.uint8),
        }

    @property
    def scratch(self) -> int:
        """The bytes of scratch memory."""
        return sum(
            ceil(count * np.dtype(dtype).itemsize / LINE) * LINE
            for count, dtype in self.scratch_parts().values()
        )


@KernelEntry
def copy_losses(lo, hi, thread, losses: F64, out: F32):
    """Copy the losses of rows lo to hi as float32."""
    for row in range(lo, hi):
        out[row] = np.float32(losses[row])


def split_scratch(scratch: np.ndarray, parts: dict[str, tuple[int, Any]]) -> dict[str, np.ndarray]:
    """Return the arrays in the scratch memory."""
    arrays, start = {}, 0
    for name, (count, dtype) in parts.items():
        size = count * np.dtype(dtype).itemsize
        arrays[name] = scratch[start : start + size].view(dtype)
        start += ceil(size / LINE) * LINE
    return arrays


def fused_loss_calls(
    fused: FusedLoss,
    outs: Sequence[np.ndarray],
    ins: Sequence[np.ndarray],
    dloss: np.ndarray,
    scratch: np.ndarray,
) -> list[Call]:
    """Return the calls of a fused loss."""
    x, w, targets, weights = ins
    loss, *gradients = outs
    dx, dw = gradients.pop(0) if fused.dx else None, gradients.pop(0) if fused.dw else None
    count, (v, d) = x.shape[0], w.shape
    part, calls = split_scratch(scratch, fused.scratch_parts()), []
    logits, work = part["logits"], part["work"]
    for first in range(0, max(1, count), fused.rows):
        token_range = slice(first, min(count, first + fused.rows))
        chunk, rows = x[token_range], len(x[token_range])
        tokens = Operand(chunk, 0, rows, d)
        left, right = (
            each.to_side(fused.mode, 0, d, fused.k_block) for each in (tokens, fused.weight_operand)
        )
        whole = Packed(memory=work, entry_bytes=0, own=work, thread_bytes=0, slab_bytes=0)
        calls.append(pack_call(tokens, left, np.zeros(1, np.int64), whole, is_a=True))
        chunk_args = fused.make_chunk(rows, part, targets[token_range])
        packed = Packed(
            memory=work,
            entry_bytes=0,
            own=work[fused.chunk_bytes :],
            thread_bytes=fused.slice_bytes,
            slab_bytes=fused.weight_operand.slab_bytes(fused.mode),
        )
        own = fused.packed_bytes(fused.columns, fused.k_block)
        calls.append(logits_slices.call(right, packed, own, chunk_args, items=fused.slices, block=1))
        ends = {"weights": weights[token_range], "dloss": dloss, "losses": part["losses"][token_range]}
        calls.append(
            finish_rows.call(chunk_args, **ends, v=v, slices=fused.slices, items=rows, block=ceil(8192 / v))
        )
        if fused.counts_correct:
            ends = {"weights": weights[token_range], "right": part["right"][token_range]}
            calls.append(
                mark_correct_rows.call(
                    chunk_args, **ends, v=v, slices=fused.slices, items=rows, block=EVAL_BLOCK
                )
            )
        if dx is not None and rows:
            calls += fused.dx_product(logits, rows).calls(dx[token_range], work)
        if dw is not None:
            calls += fused.dw_product(logits, chunk, rows).calls(dw, work, accumulate=first > 0)
    if fused.per_row:
        return [*calls, copy_losses.call(part["losses"], loss, items=count, block=COPY_BLOCK)]
    if fused.counts_correct:
        right_sum, of_rows = gradients
        calls.append(add_up.call(part["right"], right_sum, count, 1.0, items=1, block=1))
        calls.append(copy_losses.call(part["losses"], of_rows, items=count, block=COPY_BLOCK))
    return [*calls, add_up.call(part["losses"], loss, count, 1.0, items=1, block=1)]


# ---- the ops -----------------------------------------------------------------------------------


def make_loss(ins: Sequence[Any], attrs: dict[str, Any], threads: int, **what: bool) -> FusedLoss:
    """Return a fused loss with the gradients that the attributes ask for."""
    x, w, *_ = ins
    mode = tiles.choose_mode("bf16" if np.uint16 in (x.dtype, w.dtype) else "f32")
    wanted = {"dx": attrs.get("dx", False), "dw": attrs.get("dw", False)}
    return FusedLoss(x, w, **wanted, mode=mode, threads=threads, cap=attrs.get("cap", 0.0), **what)


def make_row_loss(ins: Sequence[Any], attrs: dict[str, Any], threads: int) -> FusedLoss:
    """Return a fused loss that gives the loss of each row."""
    return make_loss(ins, attrs, threads, per_row=True)


def make_eval_loss(ins: Sequence[Any], attrs: dict[str, Any], threads: int) -> FusedLoss:
    """Return a fused loss that counts correct rows."""
    return make_loss(ins, attrs, threads, counts_correct=True)


def make_loss_back(ins: Sequence[Any], attrs: dict[str, Any], threads: int) -> FusedLoss:
    """Return a fused loss with gradients; its first source is the gradient of the loss."""
    return make_loss(ins[1:], attrs, threads)


def takes(outs: Sequence[Array], ins: Sequence[Array], attrs: dict[str, Any]) -> bool:
    """Return True for float32 results, int32 targets, and sources that products can pack."""
    *_, x, w, targets, weights = ins
    gives = all(out.dtype == np.float32 for out in (*outs, weights))
    return gives and targets.dtype == np.int32 and can_pack(x) and can_pack(w)


@kernel(
    "linear_cross_entropy", lambda outs, ins, attrs, threads: make_loss(ins, attrs, threads).scratch, takes
)
def linear_cross_entropy(outs, ins, attrs, scratch, threads):
    """Return the calls of `linear_cross_entropy`."""
    return fused_loss_calls(make_loss(ins, attrs, threads), outs, ins, np.ones((), np.float32), scratch)


@kernel(
    "linear_cross_entropy_judged",
    lambda outs, ins, attrs, threads: make_eval_loss(ins, attrs, threads).scratch,
    takes,
)
def linear_cross_entropy_judged(outs, ins, attrs, scratch, threads):
    """Return the calls of `linear_cross_entropy_judged`."""
    return fused_loss_calls(make_eval_loss(ins, attrs, threads), outs, ins, np.ones((), np.float32), scratch)


@kernel(
    "linear_cross_entropy_back",
    lambda outs, ins, attrs, threads: make_loss_back(ins, attrs, threads).scratch,
    takes,
)
def linear_cross_entropy_back(outs, ins, attrs, scratch, threads):
    """Return the calls of `linear_cross_entropy_back`."""
    dloss, *sources = ins
    return fused_loss_calls(make_loss_back(ins, attrs, threads), outs, sources, dloss, scratch)


# ---- each row's own loss -----------------------------------------------------------------------


def takes_row_loss(outs: Sequence[Array], ins: Sequence[Array], attrs: dict[str, Any]) -> bool:
    """Return True for float32 results, int32 targets, and sources that products can pack."""
    *d, x, w, targets = ins
    return (
        all(each.dtype == np.float32 for each in (*outs, *d))
        and targets.dtype == np.int32
        and can_pack(x)
        and can_pack(w)
    )


@kernel(
    "linear_cross_entropy_rows",
    lambda outs, ins, attrs, threads: make_row_loss(ins, attrs, threads).scratch,
    takes_row_loss,
)
def linear_cross_entropy_rows(outs, ins, attrs, scratch, threads):
    """Return the calls of `linear_cross_entropy_rows`."""
    one = np.ones((), np.float32)
    return fused_loss_calls(
        make_row_loss(ins, attrs, threads), outs, [*ins, np.ones(len(ins[0]), np.float32)], one, scratch
    )


@kernel(
    "linear_cross_entropy_rows_back",
    lambda outs, ins, attrs, threads: make_loss_back(ins, attrs, threads).scratch,
    takes_row_loss,
)
def linear_cross_entropy_rows_back(outs, ins, attrs, scratch, threads):
    """Return the calls of `linear_cross_entropy_rows_back`."""
    d, *sources = ins
    unread = np.empty((), np.float32)
    return fused_loss_calls(
        make_loss_back(ins, attrs, threads), [unread, *outs], [*sources, d], np.ones((), np.float32), scratch
    )
