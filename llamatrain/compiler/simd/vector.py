"""Vectors of `LANES` float32 as a type for kernels, with exp and tanh.

Loops over these are vectorized as written. A compiler that must prove that arrays do not overlap gives up
exactly where the planner lets a result reuse its source. A vector is read before anything is written, so
elementwise kernels may work in place (memory.py).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llamatrain.compiler.simd import llvm_ops as W
from llamatrain.compiler.simd.vector_type import (
    Lanes,
    define_extreme,
    define_function,
    define_operators,
    define_overloaded,
    define_reduction,
)
from llamatrain.compiler.vectors import LANES

VECTOR = Lanes(f"vector{LANES}", W.FLOAT, LANES, (types.float32,))
FLOATS = VECTOR.llvm
EXACT = ("contract",)  # a flag that keeps the pass away that relaxes arithmetic

define_operators(VECTOR, EXACT, add="fadd", sub="fsub", mul="fmul", truediv="fdiv")
sqrt = define_overloaded(VECTOR, types.float32, lambda builder, x: W.call_intrinsic(builder, "sqrt", x))
splat = define_function(VECTOR, types.float32, lambda builder, x: W.splat(builder, x, FLOATS))
maximum = define_extreme(VECTOR, ">", W.NO_MINUS_ZERO)
reduce_sum, reduce_max = (
    define_reduction(VECTOR, *how, flags={"reassoc"}) for how in (("fadd", -0.0), ("fmax",))
)


# ---- a choice for each lane -------------------------------------------------


@intrinsic
def where_nonzero(typing_context: Any, x: Any, at_zero: Any, value: Any) -> Any:
    """Return `value`, or `at_zero` in the lanes where x is 0."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered("==", args[0], W.constant(FLOATS, 0.0)), args[1], args[2])

    return VECTOR(VECTOR, VECTOR, VECTOR), generate


@intrinsic
def mask_range(typing_context: Any, value: Any, index: Any, first: Any, end: Any, other: Any) -> Any:
    """Keep the lanes of `value` that are in first .. end, and set the others to `other`.

    The first lane stands for `index`.
    """

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value, index, first, end, other = args
        after, before = (W.first_lanes(builder, builder.sub(limit, index), LANES) for limit in (first, end))
        return builder.select(
            builder.and_(before, builder.not_(after)), value, W.splat(builder, other, FLOATS)
        )

    return VECTOR(VECTOR, types.int64, types.int64, types.int64, types.float32), generate


@intrinsic
def where_between(typing_context: Any, value: Any, at: Any, first: Any, end: Any, other: Any) -> Any:
    """Return `value` in the lanes where first <= at < end, `other` in the rest."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value, at, first, end, other = args
        inside = builder.and_(builder.fcmp_ordered("<=", first, at), builder.fcmp_ordered("<", at, end))
        return builder.select(inside, value, other)

    return VECTOR(VECTOR, VECTOR, VECTOR, VECTOR, VECTOR), generate


# ---- lanes among themselves --------------------------------------------------


def _shuffle(pattern: Callable[[int], int]) -> Any:
    lanes = ir.Constant(W.with_element(FLOATS, W.INT), [pattern(lane) for lane in range(LANES)])
    return define_function(VECTOR, VECTOR, lambda builder, x: builder.shuffle_vector(x, x, lanes))


SIGNS = ir.Constant(FLOATS, [-1.0 if lane % 2 == 0 else 1.0 for lane in range(LANES)])
duplicate_even = _shuffle(lambda lane: lane & ~1)  # a c .. of a b c d .., each twice
duplicate_odd = _shuffle(lambda lane: lane | 1)  # b d ..
swap_pairs = _shuffle(lambda lane: lane ^ 1)  # b a d c ..
negate_even = define_function(
    VECTOR, VECTOR, lambda builder, x: builder.fmul(x, SIGNS, flags=EXACT)
)  # -a b -c d ..


# ---- bfloat16, of one number -------------------------------------------------

to_bf16 = define_function(types.uint16, types.float32, W.to_bf16)
from_bf16 = define_function(types.float32, types.uint16, W.from_bf16)


# ---- the exponential --------------------------------------------------------

LOG2_E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 0.693145751953125, 1.428606765330187e-06
# (e^r - 1 - r) / r^2 on |r| <= ln(2) / 2, relative error of e^r 3e-9: a minimax fit
SERIES = (
    0.4999999403953552,
    0.166665181517601,
    0.041668422520160675,
    0.008369063027203083,
    0.0013813883997499943,
)
SMALLEST, LARGEST = -104.0, 89.0  # outside, the result is 0 or infinity
ROUND = 1.5 * 2.0**23  # added to x, it leaves the nearest integer in the low bits


def _constant(kind: Any, value: float) -> Any:
    return W.constant(kind, float(np.float32(value)))


def _muladd(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return W.call_intrinsic(builder, "fmuladd", a, b, c)


def _clamp(builder: Any, x: Any, smallest: float, largest: float) -> Any:
    for value, relation in ((smallest, "<"), (largest, ">")):
        limit = _constant(x.type, value)
        x = builder.select(builder.fcmp_ordered(relation, x, limit, flags=W.NO_MINUS_ZERO), limit, x)
    return x


def _reduce_argument(builder: Any, x: Any) -> tuple[Any, Any, Any, Any]:
    """Split x = n ln(2) + r: return n (integer in the low bits), n as a number, r, and (e^r - 1) / r."""
    kind = x.type
    rounded = _muladd(builder, x, _constant(kind, LOG2_E), _constant(kind, ROUND))
    n = builder.fsub(rounded, _constant(kind, ROUND), flags=EXACT)
    high = _muladd(builder, n, _constant(kind, -LN2_HIGH), x)
    r = _muladd(builder, n, _constant(kind, -LN2_LOW), high)
    series = _constant(kind, SERIES[-1])
    for coefficient in SERIES[-2::-1]:
        series = _muladd(builder, series, r, _constant(kind, coefficient))
    return rounded, n, r, _muladd(builder, series, r, _constant(kind, 1.0))


def _to_integer(builder: Any, rounded: Any) -> Any:
    kind = W.with_element(rounded.type, W.INT)
    return builder.sub(
        builder.bitcast(rounded, kind), W.constant(kind, int(np.float32(ROUND).view(np.int32)))
    )


def _power_of_two(builder: Any, n: Any, kind: Any) -> Any:
    """Return 2^n of an integer."""
    return builder.bitcast(builder.shl(builder.add(n, W.constant(n.type, 127)), W.constant(n.type, 23)), kind)


def _exp(builder: Any, x: Any) -> Any:
    """Return e^x = 2^n e^r, within 2 units of the last place; NaN stays NaN."""
    kind = x.type
    rounded, n, r, series = _reduce_argument(builder, _clamp(builder, x, SMALLEST, LARGEST))
    series = _muladd(builder, series, r, _constant(kind, 1.0))
    if kind == FLOATS and LANES == 16:
        words = (series, n, series, W.SHORT(0xFFFF), W.INT(4))
        return W.call(builder, "llvm.x86.avx512.mask.scalef.ps.512", kind, *words)
    # 2^n as two factors: n may be 128, or so low that the result is denormal
    whole = _to_integer(builder, rounded)
    half = builder.ashr(whole, W.constant(whole.type, 1))
    for part in (half, builder.sub(whole, half)):
        series = builder.fmul(series, _power_of_two(builder, part, kind), flags=EXACT)
    return series


FLAT = 10.0  # from here on tanh is 1


def _tanh(builder: Any, x: Any) -> Any:
    """Return (e^2x - 1) / (e^2x + 1), within 4 units of the last place, without cancellation; NaN stays NaN."""
    kind = x.type
    x = _clamp(builder, x, -FLAT, FLAT)
    rounded, _, r, series = _reduce_argument(builder, builder.fadd(x, x, flags=EXACT))
    power = _power_of_two(builder, _to_integer(builder, rounded), kind)
    less = builder.fmul(power, builder.fmul(series, r, flags=EXACT), flags=EXACT)
    less = builder.fadd(less, builder.fsub(power, _constant(kind, 1.0), flags=EXACT), flags=EXACT)
    return builder.fdiv(less, builder.fadd(less, _constant(kind, 2.0), flags=EXACT), flags=EXACT)


exp, tanh = (define_overloaded(VECTOR, types.float32, each) for each in (_exp, _tanh))
