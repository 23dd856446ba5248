"""Products with a short axis, as those of adapters: large matrices are read and written once, where they lie.

Every one is C[m, n] (+)= sum over k of A[m, k] B[k, n] in float32. A has any strides; rows of B and C are
contiguous. A small B that lies the other way is copied first, and a small C is turned at the end. The order of
each sum depends on k alone.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from llamatrain.compiler.declare import Call, KernelEntry, LazyModule, f32, inline
from llamatrain.compiler.vectors import LANES
from llamatrain.kernels.cpu.pack import FLOATS, MIN_WORK, Operand
from llamatrain.kernels.cpu.tile_shape import PLAIN_ROWS

plain_kernel = LazyModule("llamatrain.kernels.cpu.llvm.plain_kernel")

SHORT = 16  # the longest axis that counts as short
NEAR = 4096  # elements of B that stay in the first-level cache
MIN_DEPTH = 16  # elements along k before C is read and written again
ROWS_IN_JOB, ROWS_OF_COPY = 32, 256
MIN_COLUMNS, MAX_COLUMNS = 128, 512  # in a job: long runs of memory, and their part of C stays near


class Strided(NamedTuple):
    """A matrix, and the distances in bytes between its rows and along them."""

    memory: Any
    row: int
    step: int

    @classmethod
    def of(cls, operand: Operand) -> "Strided":
        """Return an operand that is in float32."""
        row, step = (4, 4 * operand.count) if operand.across else (4 * operand.k, 4)
        return cls(operand.source, row, step)


@dataclass(frozen=True)
class ThinPlan:
    """The plan of a product with a short axis."""

    a: Operand
    b: Operand
    turns_c: bool  # C is written as (n, m)
    threads: int

    @property
    def is_narrow(self) -> bool:
        """True if rows of C do not fill vectors: then they are computed in the thread's memory."""
        return self.b.count <= SHORT

    @property
    def width(self) -> int:
        """The columns that are computed."""
        return ceil(self.b.count / LANES) * LANES

    @property
    def copies_b(self) -> bool:
        """True if B lies the other way, or its rows do not fill vectors."""
        return self.is_narrow or not self.b.across

    @property
    def b_bytes(self) -> int:
        """The bytes of the copy of B."""
        return self.b.k * self.width * 4 if self.copies_b else 0

    @property
    def c_bytes(self) -> int:
        """The bytes of C before it is turned."""
        return self.a.count * self.b.count * 4 if self.turns_c else 0

    @property
    def thread_bytes(self) -> int:
        """The bytes that each thread needs."""
        return ROWS_IN_JOB * self.width * 4 if self.is_narrow else 0

    @property
    def sums_rows(self) -> bool:
        """True if C has few rows, each a sum over all rows of B: then jobs take columns."""
        return self.a.count <= SHORT

    @property
    def job_columns(self) -> int:
        """The columns that a job computes at a time."""
        fair = ceil(self.width / (2 * self.threads * MIN_COLUMNS)) * MIN_COLUMNS
        return min(fair, MAX_COLUMNS) if self.sums_rows else min(self.width, MAX_COLUMNS)

    @property
    def scratch(self) -> int:
        """The bytes of scratch memory."""
        return self.b_bytes + self.c_bytes + self.threads * self.thread_bytes

    def calls(self, c: np.ndarray, scratch: np.ndarray, accumulate: bool = False) -> list[Call]:
        """Return the calls that compute C."""
        m, n, k = self.a.count, self.b.count, self.a.k
        before, after, b, made = [], [], Strided(self.b.source, 4 * n, 4), c
        if self.copies_b:
            natural = b if self.b.across else Strided(self.b.source, 4, 4 * k)
            b = Strided(scratch, 4 * self.width, 4)
            before = [turn.call(b, natural, n, self.width, items=k, block=ROWS_OF_COPY)]
        if self.turns_c:
            made = scratch[self.b_bytes :]
            after = [
                turn.call(Strided(c, 4 * m, 4), Strided(made, 4, 4 * n), m, m, items=n, block=ROWS_OF_COPY)
            ]
        spare = {"space": scratch[self.b_bytes + self.c_bytes :], "thread_bytes": self.thread_bytes}
        return [*before, self.multiply_call(made, b, accumulate, spare), *after]

    def multiply_call(self, c: Any, b: Strided, accumulate: bool, spare: dict[str, Any]) -> Call:
        """Return the call that computes C."""
        m, n, k = self.a.count, self.b.count, self.a.k
        rows, columns = (m, self.job_columns) if self.sums_rows else (ROWS_IN_JOB, n)
        return multiply_thin.call(
            c,
            Strided.of(self.a),
            b,
            m=m,
            n=n,
            k=k,
            job_rows=rows,
            job_columns=columns,
            near=self.job_columns,
            k_block=max(MIN_DEPTH, NEAR // self.job_columns),
            accumulate=accumulate,
            **spare,
            items=ceil(m / rows) * ceil(n / columns),
            block=ceil(MIN_WORK / (rows * columns * k)),
        )


def choose_thin(a: Operand, b: Operand, threads: int) -> ThinPlan | None:
    """Return the plan of a product of which one axis is short, or None."""
    if any(each.form != FLOATS or each.lead or each.row_stride or not each.k for each in (a, b)):
        return None
    if a.across and b.across and a.count > SHORT >= b.count:
        return choose_sum(b, a, True, threads)
    if a.across:
        return choose_sum(a, b, False, threads)
    is_short_sum = a.k <= SHORT and b.count > SHORT and b.count % LANES == 0
    return ThinPlan(a, b, False, threads) if a.count > SHORT and (b.count <= SHORT or is_short_sum) else None


def choose_sum(a: Operand, b: Operand, turns_c: bool, threads: int) -> ThinPlan | None:
    """Return the plan of a sum over all rows of two matrices, if it makes few rows of whole vectors."""
    if a.count > SHORT or b.count <= SHORT or b.count % LANES or not b.across:
        return None
    return ThinPlan(a, b, turns_c, threads)


# ---- compiled ----------------------------------------------------------------------------------


@KernelEntry
def turn(lo, hi, thread, to: Strided, source: Strided, count, width):
    """Copy rows lo to hi of a matrix with any strides, and fill them with zeros to `width` elements."""
    for row in range(lo, hi):
        line, start = f32(to.memory + row * to.row), source.memory + row * source.row
        for i in range(count):
            line[i] = f32(start + i * source.step)[0]
        for i in range(count, width):
            line[i] = np.float32(0)


@inline
def copy_columns(c, ldc, made, pitch, rows, columns, accumulate):
    """Copy some columns, or add them."""
    for i in range(rows):
        line, source = f32(c + i * ldc), f32(made + i * pitch)
        for j in range(columns):
            line[j] = source[j] + (line[j] if accumulate else np.float32(0))


@inline
def multiply_near(c, ldc, a, b, rows, columns, k, accumulate):
    """Compute a part of C from a part of B that stays near."""
    for i in range(0, rows, PLAIN_ROWS):
        for j in range(0, columns, LANES):
            plain_kernel.multiply_rows(
                min(PLAIN_ROWS, rows - i),
                c + i * ldc + j * 4,
                ldc,
                a.memory + i * a.row,
                a.row,
                a.step,
                b.memory + j * 4,
                b.row,
                k,
                accumulate,
            )


@KernelEntry
def multiply_thin(
    lo,
    hi,
    thread,
    c,
    a: Strided,
    b: Strided,
    m,
    n,
    k,
    job_rows,
    job_columns,
    near,
    k_block,
    accumulate,
    space,
    thread_bytes,
):
    """Compute parts lo to hi of C."""
    parts = (n + job_columns - 1) // job_columns
    for item in range(lo, hi):
        i, j = item // parts * job_rows, item % parts * job_columns
        rows, columns = min(job_rows, m - i), min(job_columns, n - j)
        corner, ldc = c + (i * n + j) * 4, n * 4
        target, pitch = (space + thread * thread_bytes, b.row) if thread_bytes else (corner, ldc)
        for first in range(0, columns, near):
            for start in range(0, k, k_block):
                left = Strided(a.memory + i * a.row + start * a.step, a.row, a.step)
                right = Strided(b.memory + start * b.row + (j + first) * 4, b.row, b.step)
                more = start > 0 or (accumulate and not thread_bytes)
                multiply_near(
                    target + first * 4,
                    pitch,
                    left,
                    right,
                    rows,
                    min(near, columns - first),
                    min(k_block, k - start),
                    more,
                )
        if thread_bytes:
            copy_columns(corner, ldc, target, pitch, rows, columns, accumulate)
