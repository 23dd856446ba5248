"""Vectors of 16 float32 or 16 integers, and pointers to bytes, for blocks of quantized weights.

Written as vectors, loops over a block's bits are certain to become vector code, and each operation is rounded
by itself, as in numpy, so that results are equal to the last bit. Half floats are converted by integer
arithmetic, which every processor has.

Memory is addressed by `pointer + offset`, not by integers converted to pointers: LLVM's last pass may take
either part of an integer sum for the pointer. Numba links a helper into its callers after that pass, and
where that part is 0, the caller's code would be removed as undefined.
"""

import operator
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, ClassVar

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic

from llamatrain.compiler.simd import llvm_ops as W
from llamatrain.compiler.simd.float16 import from_half, to_half
from llamatrain.compiler.simd.vector_type import (
    Lanes,
    define_extreme,
    define_function,
    define_operators,
    define_reduction,
)

LANES = 16

FLOATS = Lanes(f"{LANES} floats", W.FLOAT, LANES, (types.float32, types.float64))
WORDS = Lanes(f"{LANES} words", W.INT, LANES, (types.int64,))
BYTES = types.CPointer(types.uint8)
REALS, INTS = FLOATS.llvm, WORDS.llvm

define_operators(FLOATS, add="fadd", sub="fsub", mul="fmul", truediv="fdiv")
define_operators(
    WORDS, add="add", sub="sub", mul="mul", and_="and_", or_="or_", xor="xor", lshift="shl", rshift="lshr"
)

minimum, maximum = define_extreme(FLOATS, "<"), define_extreme(FLOATS, ">")
reduce_sum, reduce_min, reduce_max = (
    define_reduction(FLOATS, *how, flags={"reassoc", "nnan"})
    for how in (("fadd", -0.0), ("fmin",), ("fmax",))
)
to_floats = define_function(FLOATS, WORDS, lambda builder, x: builder.sitofp(x, REALS))
to_ints = define_function(WORDS, FLOATS, lambda builder, x: builder.fptosi(x, INTS))
round_to_nearest = define_function(FLOATS, FLOATS, lambda builder, x: W.call_intrinsic(builder, "rint", x))
# Floats up to 2^22 from here are whole numbers, and their bits, as words, count them.
ROUNDING_START = 1.5 * 2.0**23


def _round_to_words(builder: Any, x: Any) -> Any:
    start = W.constant(REALS, ROUNDING_START)
    return builder.sub(builder.bitcast(builder.fadd(x, start), INTS), builder.bitcast(start, INTS))


nearest_ints = define_function(WORDS, FLOATS, _round_to_words)  # of magnitudes below 2^22; ties to even
floor = define_function(FLOATS, FLOATS, lambda builder, x: W.call_intrinsic(builder, "floor", x))
absolute = define_function(FLOATS, FLOATS, lambda builder, x: W.call_intrinsic(builder, "fabs", x))


# A magnitude's bits, as an integer, are in the order of magnitudes; infinity and NaN are above all others.
magnitude_bits = define_function(
    WORDS, FLOATS, lambda builder, x: builder.and_(builder.bitcast(x, INTS), W.constant(INTS, 0x7FFFFFFF))
)
bits_to_float = define_function(
    types.float32, types.int64, lambda builder, x: builder.bitcast(builder.trunc(x, W.INT), W.FLOAT)
)
spread = define_function(WORDS, types.int64, lambda builder, x: W.splat(builder, x, INTS))
count_up = define_function(
    WORDS,
    types.int64,
    lambda builder, x: builder.add(W.splat(builder, x, INTS), ir.Constant(INTS, list(range(LANES)))),
)  # x, x + 1, ..


@intrinsic
def where_nonzero(typing_context: Any, condition: Any, value: Any) -> Any:
    """Return `value`, or 0 in the lanes where the condition is 0."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        zero = W.constant(REALS, 0.0)
        return builder.select(builder.fcmp_ordered("==", args[0], zero), zero, args[1])

    return FLOATS(FLOATS, FLOATS), generate


def _reduce_words(name: str) -> Any:
    def reduce(builder: Any, x: Any) -> Any:
        return builder.sext(W.call(builder, f"llvm.vector.reduce.{name}.v{LANES}i32", W.INT, x), W.LONG)

    return define_function(types.int64, WORDS, reduce)


reduce_word_sum, reduce_word_max = _reduce_words("add"), _reduce_words("smax")


@intrinsic
def larger_words(typing_context: Any, x: Any, y: Any) -> Any:
    """Return the larger word of each lane."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(builder.icmp_signed(">", *args), *args)

    return WORDS(WORDS, WORDS), generate


@intrinsic
def sum_fours(typing_context: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Return the sums of four of 64 numbers each: of 0, 1, 4 and 5 and of 2, 3, 6 and 7 of each eight, in any order."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        def add(x: Any, y: Any, distance: int) -> Any:
            """Add the numbers of both vectors to those that are `distance` further."""
            lanes = [lane for lane in range(2 * LANES) if not lane & distance]
            picks = ([lane + more for lane in lanes] for more in (0, distance))
            return builder.fadd(*(builder.shuffle_vector(x, y, ir.Constant(INTS, pick)) for pick in picks))

        first, second, third, fourth = args
        return add(add(first, second, 4), add(third, fourth, 4), 1)

    return FLOATS(FLOATS, FLOATS, FLOATS, FLOATS), generate


@intrinsic
def splat(typing_context: Any, x: Any) -> Any:
    """Return a vector with x in every lane."""
    return FLOATS(types.float32), lambda context, builder, sig, args: W.splat(builder, args[0], REALS)


@intrinsic
def splat_halves(typing_context: Any, low: Any, high: Any) -> Any:
    """Return a vector with one number in its first eight lanes and another in the others."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lanes = ir.Constant(INTS, [0] * (LANES // 2) + [LANES] * (LANES // 2))
        return builder.shuffle_vector(*(W.splat(builder, each, REALS) for each in args), lanes)

    return FLOATS(types.float32, types.float32), generate


@intrinsic
def copy_sign(typing_context: Any, size: Any, of: Any) -> Any:
    """Return the sizes with the signs of other numbers."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return W.call_intrinsic(builder, "copysign", *args)

    return FLOATS(FLOATS, FLOATS), generate


@intrinsic
def unpack_bits(typing_context: Any, word: Any) -> Any:
    """Return the lowest 16 bits of a number, one in each lane."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        moved = builder.lshr(W.splat(builder, args[0], INTS), ir.Constant(INTS, list(range(LANES))))
        return builder.and_(moved, W.constant(INTS, 1))

    return WORDS(types.int64), generate


def make_words(numbers: Sequence[int]) -> Any:
    """Return a function without arguments that returns constant words."""

    @intrinsic
    def words(typing_context: Any) -> Any:
        return WORDS(), lambda context, builder, sig, args: ir.Constant(INTS, list(numbers))

    return words


def make_permutation(lanes: Sequence[int]) -> Any:
    """Return a function that takes the words of these lanes."""
    return define_function(
        WORDS, WORDS, lambda builder, x: builder.shuffle_vector(x, x, ir.Constant(INTS, list(lanes)))
    )


def make_lookup(table: Sequence[int]) -> Any:
    """Return a function from words 0 to 15 to the floats of a table.

    It selects by each bit, which needs no special instruction.
    """

    def choose(builder: Any, words: Any) -> Any:
        level = [W.constant(REALS, float(value)) for value in table]
        for bit in range(4):
            odd = builder.trunc(builder.lshr(words, W.constant(INTS, bit)), W.with_element(INTS, W.BIT))
            level = [builder.select(odd, level[i + 1], level[i]) for i in range(0, len(level), 2)]
        return level[0]

    return define_function(FLOATS, WORDS, choose)


def make_step_function(
    table: Sequence[int], result: Any, kind: Any, increment: Callable[[int], float]
) -> Any:
    """Return a step function of floats over a rising table.

    It sums the increments of all indices whose midpoint with the index before is not above x.
    """

    def climb(builder: Any, x: Any) -> Any:
        parts = []
        for index in range(1, len(table)):
            beyond = builder.fcmp_ordered(">=", x, W.constant(REALS, (table[index - 1] + table[index]) / 2))
            parts.append(builder.select(beyond, W.constant(kind, increment(index)), W.constant(kind, 0)))
        plus = builder.fadd if kind is REALS else builder.add
        while len(parts) > 1:
            parts = [
                plus(*parts[i : i + 2]) if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)
            ]
        return plus(parts[0], W.constant(kind, increment(0)))

    return define_function(result, FLOATS, climb)


def make_nearest_value(table: Sequence[int]) -> Any:
    """Return a function to the nearest number of a table."""
    return make_step_function(
        table, FLOATS, REALS, lambda place: float(table[place] - (table[place - 1] if place else 0))
    )


def make_nearest_index(table: Sequence[int]) -> Any:
    """Return a function to the index of the nearest number of a table."""
    return make_step_function(table, WORDS, INTS, lambda place: int(place > 0))


round_to_half = define_function(
    types.float32, types.float32, lambda b, x: from_half(b, b.zext(to_half(b, x), W.INT))
)  # round to a half float


# ---- memory: `name(pointer)`, `name(pointer, value)`; nothing need be aligned --------------------


@infer_global(operator.add)
class Offset(ConcreteTemplate):
    """Types pointer + integer."""

    cases: ClassVar = [signature(BYTES, BYTES, types.int64)]


@lower_builtin(operator.add, BYTES, types.int64)
def _offset(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return builder.gep(args[0], [args[1]])


def _make_load(element: Any, result: Any, convert: Callable[[Any, Any], Any]) -> Any:
    kind = W.with_element(result.llvm, element) if isinstance(result, Lanes) else element

    @intrinsic
    def load(typing_context: Any, pointer: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return convert(builder, W.load(builder, args[0], kind, align=1))

        return result(BYTES), generate

    return load


def _make_store(argument: Any, convert: Callable[[Any, Any], Any]) -> Any:
    @intrinsic
    def store(typing_context: Any, pointer: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            W.store(builder, convert(builder, args[1]), args[0], align=1)
            return context.get_dummy_value()

        return types.void(BYTES, argument), generate

    return store


def _widen(then: Callable[[Any, Any], Any] = lambda builder, word: word) -> Callable[[Any, Any], Any]:
    return lambda builder, value: then(builder, builder.zext(value, W.with_element(value.type, W.INT)))


def _identity(builder: Any, value: Any) -> Any:
    return value


get_floats, put_floats = _make_load(W.FLOAT, FLOATS, _identity), _make_store(FLOATS, _identity)
get_halves, put_halves = _make_load(W.SHORT, FLOATS, _widen(from_half)), _make_store(FLOATS, to_half)
get_bf16s, put_bf16s = _make_load(W.SHORT, FLOATS, W.from_bf16), _make_store(FLOATS, W.to_bf16)
get_bytes = _make_load(W.BYTE, WORDS, _widen())
put_bytes = _make_store(WORDS, lambda builder, x: builder.trunc(x, W.with_element(INTS, W.BYTE)))
get_words, put_words = _make_load(W.INT, WORDS, _identity), _make_store(WORDS, _identity)
get_signed = _make_load(W.BYTE, WORDS, lambda builder, value: builder.sext(value, INTS))

get_float, put_float = _make_load(W.FLOAT, types.float32, _identity), _make_store(types.float32, _identity)
get_half = _make_load(W.SHORT, types.float32, _widen(from_half))
put_half = _make_store(types.float32, to_half)
get_bf16, put_bf16 = _make_load(W.SHORT, types.float32, W.from_bf16), _make_store(types.float32, W.to_bf16)
get_byte = _make_load(W.BYTE, types.int64, lambda builder, value: builder.zext(value, W.LONG))
get_short = _make_load(W.SHORT, types.int64, lambda builder, value: builder.zext(value, W.LONG))
get_int8 = _make_load(W.BYTE, types.int64, lambda builder, value: builder.sext(value, W.LONG))
get_word = _make_load(W.INT, types.int64, lambda builder, value: builder.sext(value, W.LONG))
put_word = _make_store(types.int64, lambda builder, value: builder.trunc(value, W.INT))
put_byte = _make_store(types.int64, lambda builder, value: builder.trunc(value, W.BYTE))
put_short = _make_store(types.int64, lambda builder, value: builder.trunc(value, W.SHORT))


@intrinsic
def to_float(typing_context: Any, number: Any) -> Any:
    """Convert an integer to float32."""
    return types.float32(types.int64), lambda context, builder, sig, args: builder.sitofp(args[0], W.FLOAT)


@intrinsic
def pack_bits(typing_context: Any, words: Any) -> Any:
    """Return the lowest bit of each lane as the lowest 16 bits of a number."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lowest = builder.trunc(args[0], W.with_element(INTS, W.BIT))
        return builder.zext(builder.bitcast(lowest, W.SHORT), W.LONG)

    return types.int64(WORDS), generate


# ---- arrays of a function's own ----------------------------------------------------------------------


@intrinsic
def local_vector(typing_context: Any) -> Any:
    """Return the address of 16 floats on the stack."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        space = cgutils.alloca_once(builder, REALS)
        return builder.bitcast(space, W.POINTER)

    return BYTES(), generate


def make_zeros(element: str, *shape: int) -> Any:
    """Return an intrinsic that allocates a zeroed array of this shape on the stack."""
    kind = types.Array(getattr(types, element), len(shape), "C")

    @intrinsic
    def zeros(typing_context: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            held = context.get_data_type(kind.dtype)
            size = context.get_abi_sizeof(held)
            space = cgutils.alloca_once(builder, ir.ArrayType(held, prod(shape)))
            builder.store(ir.Constant(space.type.pointee, None), space)
            made = context.make_array(kind)(context, builder)
            steps = [size * prod(shape[at + 1 :]) for at in range(len(shape))]
            made.shape, made.strides = (
                cgutils.pack_array(builder, [W.LONG(n) for n in row]) for row in (shape, steps)
            )
            made.data, made.itemsize, made.nitems = (
                builder.bitcast(space, made.data.type),
                W.LONG(size),
                W.LONG(prod(shape)),
            )
            return made._getvalue()

        return kind(), generate

    return zeros
