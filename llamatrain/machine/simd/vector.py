"""Registers of `LANES` float32 as a type that kernels compute with, and the exponential.

Loops over these are vectorised as written: a compiler that has to prove that arrays do not overlap gives up exactly where
the plan lets a result lie on its source. A vector is read whole before anything is written, so elementwise kernels may
work in place. `load` and `store` also take arrays of bfloat16 (uint16), widening and rounding on the way.
"""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, models, register_model

from llamatrain.kernels.cpu.binding import share
from llamatrain.machine import units

LANES = units.floats()
FLOAT, FLOATS, DOUBLES = ir.FloatType(), ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.DoubleType(), LANES)
WORDS, HALVES = ir.VectorType(ir.IntType(32), LANES), ir.VectorType(ir.IntType(16), LANES)
PORTIONS = 64  # blocks of a large array
STREAM = 16 << 20  # bytes of a result from which on it is written past the caches
EXACT = ("contract",)  # keeps the pass that relaxes arithmetic away from ours


class Vector(types.Type):
    def __init__(self) -> None:
        super().__init__(f"vector{LANES}")


VECTOR = Vector()


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, FLOATS)


def _splat(builder: Any, value: Any) -> Any:
    """A scalar in every lane; a vector as it is."""
    if value.type == FLOATS:
        return value
    one = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(one, one, ir.Constant(WORDS, [0] * LANES))


def _call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    kinds = [arg.type for arg in args]
    return builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, kinds), name), args)


def _constant(kind: Any, value: float) -> Any:
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def _suffix(kind: Any) -> str:
    return f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"


def _integers(kind: Any) -> Any:
    return WORDS if isinstance(kind, ir.VectorType) else ir.IntType(32)


# ---- arithmetic: vectors with vectors and with numbers ----------------------


def _define(operation: Callable[..., Any], instruction: str) -> None:
    pairs = [(VECTOR, VECTOR), (VECTOR, types.float32), (types.float32, VECTOR)]

    @infer_global(operation)
    class Template(ConcreteTemplate):
        cases = tuple(signature(VECTOR, *pair) for pair in pairs)

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*(_splat(builder, arg) for arg in args), flags=EXACT)

    for pair in pairs:
        lower_builtin(operation, *pair)(lower)


for _name, _instruction in (("add", "fadd"), ("sub", "fsub"), ("mul", "fmul"), ("truediv", "fdiv")):
    for _operation in (_name, "i" + _name):
        _define(getattr(operator, _operation), _instruction)


def _function(generate: Callable[[Any, Any], Any]) -> Any:
    """`generate(builder, value)` as a function of a float32 or a vector."""

    @intrinsic
    def function(typing_context: Any, x: Any) -> Any:
        kind = x if isinstance(x, Vector) else types.float32
        return kind(kind), lambda context, builder, sig, args: generate(builder, args[0])

    return function


sqrt = _function(lambda builder, x: _call(builder, f"llvm.sqrt.{_suffix(x.type)}", x.type, x))


@intrinsic
def splat(typing_context: Any, x: Any) -> Any:
    return VECTOR(types.float32), lambda context, builder, sig, args: _splat(builder, args[0])


@intrinsic
def otherwise(typing_context: Any, x: Any, at_zero: Any, value: Any) -> Any:
    """`value`, but `at_zero` in the lanes where x is 0."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered("==", args[0], ir.Constant(FLOATS, [0.0] * LANES)), args[1], args[2])

    return VECTOR(VECTOR, VECTOR, VECTOR), generate


@intrinsic
def larger(typing_context: Any, x: Any, y: Any) -> Any:
    """The larger in each lane, y where either is NaN."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        x, y = (_splat(builder, arg) for arg in args)
        return builder.select(builder.fcmp_ordered(">", x, y, flags=("nsz",)), x, y)

    return VECTOR(VECTOR, VECTOR if isinstance(y, Vector) else types.float32), generate


def _reduction(name: str, *start: float) -> Any:
    @intrinsic
    def reduce(typing_context: Any, x: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            call = _call(builder, f"llvm.vector.reduce.{name}.v{LANES}f32", FLOAT, *map(FLOAT, start), args[0])
            call.fastmath.add("reassoc")
            return call

        return types.float32(VECTOR), generate

    return reduce


total = _reduction("fadd", -0.0)
largest = _reduction("fmax")


# ---- the exponential --------------------------------------------------------

LOG2_E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 0.693145751953125, 1.428606765330187e-06
# (e^r - 1 - r) / r^2 on |r| <= ln(2) / 2, relative error of e^r 3e-9: a minimax fit
SERIES = (0.4999999403953552, 0.166665181517601, 0.041668422520160675, 0.008369063027203083, 0.0013813883997499943)
SMALLEST, LARGEST = -104.0, 89.0  # beyond these it is 0 and infinity
ROUND = 1.5 * 2.0**23  # adding it leaves the nearest integer in the low bits


def _exp(builder: Any, x: Any) -> Any:
    """e^x = 2^n e^r, within 2 units of the last place; NaN stays NaN."""
    kind, integers = x.type, _integers(x.type)

    def number(value: float) -> Any:
        return _constant(kind, float(np.float32(value)))

    def muladd(a: Any, b: Any, c: Any) -> Any:
        return _call(builder, f"llvm.fmuladd.{_suffix(kind)}", kind, a, b, c)

    for limit, beyond in ((SMALLEST, "<"), (LARGEST, ">")):
        x = builder.select(builder.fcmp_ordered(beyond, x, number(limit), flags=("nsz",)), number(limit), x)
    rounded = muladd(x, number(LOG2_E), number(ROUND))
    n = builder.fsub(rounded, number(ROUND), flags=EXACT)
    r = muladd(n, number(-LN2_LOW), muladd(n, number(-LN2_HIGH), x))
    series = number(SERIES[-1])
    for coefficient in SERIES[-2::-1]:
        series = muladd(series, r, number(coefficient))
    series = muladd(muladd(series, r, number(1.0)), r, number(1.0))
    if kind == FLOATS and LANES == 16:
        words = (series, n, series, ir.Constant(ir.IntType(16), 0xFFFF), ir.Constant(ir.IntType(32), 4))
        return _call(builder, "llvm.x86.avx512.mask.scalef.ps.512", kind, *words)
    # 2^n in two halves: n may be 128, or so low that the result loses bits
    whole = builder.sub(builder.bitcast(rounded, integers), _constant(integers, int(np.float32(ROUND).view(np.int32))))
    half = builder.ashr(whole, _constant(integers, 1))
    for part in (half, builder.sub(whole, half)):
        power = builder.shl(builder.add(part, _constant(integers, 127)), _constant(integers, 23))
        series = builder.fmul(series, builder.bitcast(power, kind), flags=EXACT)
    return series


exp = _function(_exp)


# ---- bfloat16: the upper half of a float32 ----------------------------------


def _to_bf16(builder: Any, x: Any) -> Any:
    """To the nearest, ties to even; NaN stays NaN."""
    words = _integers(x.type)
    bits = builder.bitcast(x, words)
    upper = builder.lshr(bits, _constant(words, 16))
    up = builder.add(builder.and_(upper, _constant(words, 1)), _constant(words, 0x7FFF))
    nearest = builder.lshr(builder.add(bits, up), _constant(words, 16))
    is_nan = builder.fcmp_unordered("uno", x, x, flags=("nsz",))
    kept = builder.select(is_nan, builder.or_(upper, _constant(words, 0x40)), nearest)
    return builder.trunc(kept, HALVES if isinstance(words, ir.VectorType) else ir.IntType(16))


def _from_bf16(builder: Any, x: Any) -> Any:
    vector = isinstance(x.type, ir.VectorType)
    words = WORDS if vector else ir.IntType(32)
    return builder.bitcast(builder.shl(builder.zext(x, words), _constant(words, 16)), FLOATS if vector else FLOAT)


@intrinsic
def to_bf16(typing_context: Any, x: Any) -> Any:
    return types.uint16(types.float32), lambda context, builder, sig, args: _to_bf16(builder, args[0])


@intrinsic
def from_bf16(typing_context: Any, x: Any) -> Any:
    return types.float32(types.uint16), lambda context, builder, sig, args: _from_bf16(builder, args[0])


# ---- memory -----------------------------------------------------------------


def _kind(pointer: Any) -> tuple[Any, str, int]:
    """The lanes in memory, their name in LLVM, the size of one."""
    return (HALVES, f"v{LANES}i16", 2) if pointer.dtype == types.uint16 else (FLOATS, f"v{LANES}f32", 4)


def _address(builder: Any, lanes: Any, pointer: Any, index: Any) -> Any:
    return builder.bitcast(builder.gep(pointer, [index]), lanes.as_pointer())


def _present(builder: Any, count: Any) -> Any:
    """A mask of the first `count` lanes."""
    word = builder.trunc(count, ir.IntType(32))
    one = builder.insert_element(ir.Constant(WORDS, ir.Undefined), word, ir.IntType(32)(0))
    all_of_it = builder.shuffle_vector(one, one, ir.Constant(WORDS, [0] * LANES))
    return builder.icmp_signed("<", ir.Constant(WORDS, list(range(LANES))), all_of_it)


@intrinsic
def load(typing_context: Any, pointer: Any, index: Any) -> Any:
    lanes, _, size = _kind(pointer)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value = builder.load(_address(builder, lanes, *args), align=size)
        return _from_bf16(builder, value) if lanes == HALVES else value

    return VECTOR(pointer, types.int64), generate


@intrinsic
def store(typing_context: Any, pointer: Any, index: Any, value: Any) -> Any:
    lanes, _, size = _kind(pointer)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value = _to_bf16(builder, args[2]) if lanes == HALVES else args[2]
        builder.store(value, _address(builder, lanes, *args[:2]), align=size)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, VECTOR), generate


@intrinsic
def load_to(typing_context: Any, pointer: Any, index: Any, end: Any) -> Any:
    """The elements from `index` on, 0 in the lanes from `end` on, whose memory is not touched."""
    lanes, name, size = _kind(pointer)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        left = builder.sub(args[2], args[1])
        address = _address(builder, lanes, *args[:2])
        with builder.if_else(builder.icmp_signed(">=", left, left.type(LANES)), likely=True) as (whole, part):
            with whole:
                full, from_whole = builder.load(address, align=size), builder.block
            with part:
                rest = (ir.IntType(32)(size), _present(builder, left), ir.Constant(lanes, [0] * LANES))
                some, from_part = _call(builder, f"llvm.masked.load.{name}.p0", lanes, address, *rest), builder.block
        value = builder.phi(lanes)
        value.add_incoming(full, from_whole)
        value.add_incoming(some, from_part)
        return _from_bf16(builder, value) if lanes == HALVES else value

    return VECTOR(pointer, types.int64, types.int64), generate


@intrinsic
def store_to(typing_context: Any, pointer: Any, index: Any, end: Any, value: Any, past: Any) -> Any:
    """Write the lanes before `end`; if `past` is not 0, past the caches: then the address must be that of a whole register."""
    lanes, name, size = _kind(pointer)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        left = builder.sub(args[2], args[1])
        address = _address(builder, lanes, *args[:2])
        value = _to_bf16(builder, args[3]) if lanes == HALVES else args[3]
        with builder.if_else(builder.icmp_signed(">=", left, left.type(LANES)), likely=True) as (whole, part):
            with whole, builder.if_else(builder.icmp_signed("!=", args[4], args[4].type(0))) as (streamed, kept):
                with streamed:
                    written = builder.store(value, address, align=size * LANES)
                    written.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
                with kept:
                    builder.store(value, address, align=size)
            with part:
                rest = (ir.IntType(32)(size), _present(builder, left))
                _call(builder, f"llvm.masked.store.{name}.p0", ir.VoidType(), value, address, *rest)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, types.int64, VECTOR, types.int64), generate


@intrinsic
def within(typing_context: Any, value: Any, index: Any, first: Any, end: Any, other: Any) -> Any:
    """The lanes of `value`, whose first stands for `index`, that lie in first .. end; `other` in the rest."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value, index, first, end, other = args
        after, before = (_present(builder, builder.sub(limit, index)) for limit in (first, end))
        return builder.select(builder.and_(before, builder.not_(after)), value, _splat(builder, other))

    return VECTOR(VECTOR, types.int64, types.int64, types.int64, types.float32), generate


def portion(items: int, cost: int = 4, unit: int = 1) -> int:
    """How many items of this cost a block has: of large arrays a 64th, since memory is twice as fast to who reads on and on."""
    block = max(share(cost), -(-items // PORTIONS))
    return -(-block // unit) * unit


def streams(out: np.ndarray, *sources: np.ndarray) -> bool:
    """Whether a result goes past the caches: nothing of one so large would still be there when it is read."""
    whole = out.ctypes.data % 64 == 0 and (out.shape[-1] * out.itemsize) % 64 == 0
    return out.nbytes >= STREAM and whole and not any(np.may_share_memory(out, source) for source in sources)


def _shuffle(pattern: Callable[[int], int]) -> Any:
    places = ir.Constant(WORDS, [pattern(lane) for lane in range(LANES)])
    return _function(lambda builder, x: builder.shuffle_vector(x, x, places))


evens = _shuffle(lambda lane: lane & ~1)  # a c .. of a b c d .., each twice
odds = _shuffle(lambda lane: lane | 1)  # b d ..
swapped = _shuffle(lambda lane: lane ^ 1)  # b a d c ..


@intrinsic
def alternate(typing_context: Any, x: Any) -> Any:
    """-a b -c d .. of a b c d .."""
    signs = [-1.0 if lane % 2 == 0 else 1.0 for lane in range(LANES)]
    return VECTOR(VECTOR), lambda context, builder, sig, args: builder.fmul(args[0], ir.Constant(FLOATS, signs), flags=EXACT)
