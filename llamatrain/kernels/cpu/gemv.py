"""Products of a few rows, as in decoding: y = x wᵀ reads the weight once, where it lies, and packs nothing.

A job takes some rows of w, and computes the dot product of each with every row of x. No sum is split, so the
number of threads changes no bits. A weight of another precision than the product's (quantized, or float32 for
bf16) is decoded row by row.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from llamatrain.compiler.declare import F32, Call, KernelEntry, f32, inline, u16
from llamatrain.compiler.vectors import LANES, load, load_until, reduce_sum, splat
from llamatrain.gguf.quants import kinds as K
from llamatrain.gguf.quants.decoding import decode_rows
from llamatrain.kernels.cpu.chunking import choose_block
from llamatrain.kernels.cpu.dequantize import decode
from llamatrain.kernels.quantized import Blocks

MAX_ROWS = 3  # rows of x; with more, packing is faster
LINE = 64
STEP = 4 * LANES
ZERO = np.float32(0)


@dataclass(frozen=True)
class GemvPlan:
    """The plan of a product of few rows."""

    x: Any  # (..., rows, k)
    w: Any  # (n, k)
    half: bool  # True for a product in bf16
    threads: int

    @property
    def rows(self) -> int:
        """The rows of x."""
        return int(self.x.size // self.x.shape[-1])

    @property
    def rounds_x(self) -> bool:
        """True if x must be rounded to the product's precision."""
        return self.half and self.x.dtype != np.uint16

    @property
    def copy_bytes(self) -> int:
        """The bytes of the rounded copy of x."""
        return ceil(self.x.size * 2 / LINE) * LINE if self.rounds_x else 0

    @property
    def kind(self) -> int:
        """The ggml type number of the weight."""
        return (
            self.w.kind.number
            if isinstance(self.w, Blocks)
            else K.BF16
            if self.w.dtype == np.uint16
            else K.F32
        )

    @property
    def decode_bytes(self) -> int:
        """The bytes that a thread needs to decode a row."""
        k = self.w.shape[-1]
        return (
            0
            if self.kind == (K.BF16 if self.half else K.F32)
            else ceil(k * (2 if self.half else 4) / LINE) * LINE
        )

    @property
    def scratch(self) -> int:
        """The bytes of scratch memory."""
        return self.copy_bytes + self.threads * self.decode_bytes

    def calls(
        self, y: np.ndarray, scratch: np.ndarray, accumulate: bool = False, bias: Any = 0
    ) -> list[Call]:
        """Return the calls that compute y, or add to it, plus a bias for each column if given."""
        calls, x, (*_, n, k) = [], self.x, self.w.shape
        if self.rounds_x:
            rounding = {"source": x, "source_pitch": k * 4, "to": scratch, "to_pitch": k * 2, "elements": k}
            calls.append(decode_rows.call(K.F32, 1, **rounding, items=self.rows, block=self.rows))
            x = scratch
        w, row_bytes = (
            (self.w.raw, self.w.row_bytes) if isinstance(self.w, Blocks) else (self.w, k * self.w.itemsize)
        )
        weight = {"kind": self.kind, "w": w, "row_bytes": row_bytes}
        spare = {"scratch": scratch[self.copy_bytes :], "decode_bytes": self.decode_bytes}
        block = choose_block(n, self.rows * k // LANES)
        how = {"y": y, "n": n, "accumulate": accumulate, "bias": bias, **spare}
        return [*calls, multiply_rows.call(self.half, x, self.rows, k, **weight, **how, items=n, block=block)]


# ---- compiled ----------------------------------------------------------------------------------


@inline
def dot(x, w, count):
    """Return the dot product of two rows."""
    a, b, c, d = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
    whole = count // STEP * STEP
    for i in range(0, whole, STEP):
        a += load(x, i) * load(w, i)
        b += load(x, i + LANES) * load(w, i + LANES)
        c += load(x, i + 2 * LANES) * load(w, i + 2 * LANES)
        d += load(x, i + 3 * LANES) * load(w, i + 3 * LANES)
    for i in range(whole, count, LANES):
        a += load_until(x, i, count) * load_until(w, i, count)
    return reduce_sum((a + b) + (c + d))


@KernelEntry
def multiply_rows(
    lo, hi, thread, half, x, rows, k, kind, w, row_bytes, y: F32, n, accumulate, bias, scratch, decode_bytes
):
    """Compute columns lo to hi of y."""
    buffer = scratch + thread * decode_bytes
    for column in range(lo, hi):
        row_address = w + column * row_bytes
        if decode_bytes:
            decode(kind, buffer, half, row_address, k)
            row_address = buffer
        for row in range(rows):
            before = y[row * n + column] if accumulate else ZERO
            if half:
                y[row * n + column] = before + dot(u16(x + row * k * 2), u16(row_address), k)
            else:
                y[row * n + column] = before + dot(f32(x + row * k * 4), f32(row_address), k)
            if bias:
                y[row * n + column] += f32(bias)[column]
