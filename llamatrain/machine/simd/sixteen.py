"""Sixteen float32, or sixteen 32-bit integers, as types that compiled code computes with, and pointers to bytes.

Written out as vectors the loops over a block's bits surely become vector code, and each operation is rounded by itself, as
numpy rounds: that makes the results the same to the last bit. Half floats are taken apart by integer arithmetic, which
every processor has.

Memory is reached by `pointer + offset`, not by integers made pointers: LLVM's last pass may take either part of an integer
sum for the pointer, Numba links a helper into its callers after that pass, and where that part is 0 the caller's code, which
then reads from nowhere, is thrown away.
"""

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, models, register_model

LANES = 16
BYTE, SHORT, INT, FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
INTS, REALS = ir.VectorType(INT, LANES), ir.VectorType(FLOAT, LANES)

# A function that entries call. Arithmetic is as written: left unsaid, `fastmath` would be that of the caller.
exact = partial(numba.njit, error_model="numpy", fastmath=False, nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


class Lanes(types.Type):
    def __init__(self, name: str, scalars: Sequence[types.Type], llvm: Any) -> None:
        self.scalars, self.llvm = scalars, llvm
        super().__init__(f"{LANES} {name}")


class FloatLanes(Lanes): ...


class IntLanes(Lanes): ...


FLOATS = FloatLanes("floats", (types.float32, types.float64), REALS)
WORDS = IntLanes("words", (types.int64,), INTS)
BYTES = types.CPointer(types.uint8)


@register_model(FloatLanes)
@register_model(IntLanes)
class LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, kind.llvm)


def _each(kind: Any, number: float) -> Any:
    """A constant of the kind, in every lane if it has lanes."""
    return ir.Constant(kind, [number] * LANES if isinstance(kind, ir.VectorType) else number)


def _splat(builder: Any, value: Any, kind: Any) -> Any:
    """A scalar in every lane, made the lane's kind; a vector as it is."""
    if isinstance(value.type, ir.VectorType):
        return value
    if value.type != kind.element:
        narrow = builder.trunc if kind == INTS else builder.fptrunc if value.type == ir.DoubleType() else builder.sitofp
        value = narrow(value, kind.element)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, INT(0))
    return builder.shuffle_vector(one, one, ir.Constant(INTS, [0] * LANES))


def _like(kind: Any, element: Any) -> Any:
    """Another element, in lanes if `kind` has them."""
    return ir.VectorType(element, LANES) if isinstance(kind, ir.VectorType) else element


def _call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


# ---- arithmetic: lanes with lanes and with numbers ----------------------------------------------


def _define(operation: Callable[..., Any], instruction: str, kind: Lanes) -> None:
    pairs = [(kind, kind), *((kind, scalar) for scalar in kind.scalars), *((scalar, kind) for scalar in kind.scalars)]

    @infer_global(operation)
    class Template(ConcreteTemplate):
        cases: ClassVar = [signature(kind, *pair) for pair in pairs]

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*(_splat(builder, arg, kind.llvm) for arg in args))

    for pair in pairs:
        lower_builtin(operation, *pair)(lower)


for _name, _of_floats, _of_words in (
    ("add", "fadd", "add"),
    ("sub", "fsub", "sub"),
    ("mul", "fmul", "mul"),
    ("truediv", "fdiv", None),
    ("and_", None, "and_"),
    ("or_", None, "or_"),
    ("lshift", None, "shl"),
    ("rshift", None, "lshr"),
):
    for _instruction, _kind in ((_of_floats, FLOATS), (_of_words, WORDS)):
        if _instruction:
            for _operation in (_name, "i" + _name.rstrip("_")):
                _define(getattr(operator, _operation), _instruction, _kind)


def _function(gives: Any, takes: Any, generate: Callable[..., Any]) -> Any:
    """`generate(builder, value)` as a function of lanes."""

    @intrinsic
    def function(typing_context: Any, x: Any) -> Any:
        return gives(takes), lambda context, builder, sig, args: generate(builder, *args)

    return function


def _extreme(relation: str) -> Any:
    @intrinsic
    def function(typing_context: Any, x: Any, y: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            x, y = (_splat(builder, arg, REALS) for arg in args)
            return builder.select(builder.fcmp_ordered(relation, x, y), x, y)

        return FLOATS(FLOATS, y), generate

    return function


def _reduction(name: str, *start: float) -> Any:
    def reduce(builder: Any, x: Any) -> Any:
        call = _call(builder, f"llvm.vector.reduce.{name}.v{LANES}f32", FLOAT, *map(FLOAT, start), x)
        call.fastmath.update({"reassoc", "nnan"})  # the order of a sum over lanes is the compiler's, and always the same
        return call

    return _function(types.float32, FLOATS, reduce)


smaller, larger = _extreme("<"), _extreme(">")
total, least, largest = _reduction("fadd", -0.0), _reduction("fmin"), _reduction("fmax")
floats = _function(FLOATS, WORDS, lambda builder, x: builder.sitofp(x, REALS))
whole = _function(WORDS, FLOATS, lambda builder, x: builder.fptosi(x, INTS))
nearest = _function(FLOATS, FLOATS, lambda builder, x: _call(builder, f"llvm.rint.v{LANES}f32", REALS, x))
floor = _function(FLOATS, FLOATS, lambda builder, x: _call(builder, f"llvm.floor.v{LANES}f32", REALS, x))
size = _function(FLOATS, FLOATS, lambda builder, x: _call(builder, f"llvm.fabs.v{LANES}f32", REALS, x))


@intrinsic
def splat(typing_context: Any, x: Any) -> Any:
    return FLOATS(types.float32), lambda context, builder, sig, args: _splat(builder, args[0], REALS)


@intrinsic
def signed(typing_context: Any, size: Any, of: Any) -> Any:
    """The sizes with the signs of others."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _call(builder, f"llvm.copysign.v{LANES}f32", REALS, *args)

    return FLOATS(FLOATS, FLOATS), generate


@intrinsic
def bits(typing_context: Any, word: Any) -> Any:
    """The lowest sixteen bits of a number, one in each lane."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        moved = builder.lshr(_splat(builder, args[0], INTS), ir.Constant(INTS, list(range(LANES))))
        return builder.and_(moved, _each(INTS, 1))

    return WORDS(types.int64), generate


def lookup(table: Sequence[int]) -> Any:
    """A function from words 0 to 15 to the table's floats: a choice for each bit, which needs no instruction of its own kind."""

    def choose(builder: Any, words: Any) -> Any:
        level = [_each(REALS, float(value)) for value in table]
        for bit in range(4):
            odd = builder.trunc(builder.lshr(words, _each(INTS, bit)), ir.VectorType(ir.IntType(1), LANES))
            level = [builder.select(odd, level[i + 1], level[i]) for i in range(0, len(level), 2)]
        return level[0]

    return _function(FLOATS, WORDS, choose)


# ---- half floats, of one or of sixteen ----------------------------------------------------------


def _from_half(builder: Any, word: Any) -> Any:
    """The float32 that 16 bits of an i32 stand for."""
    kind, real = word.type, _like(word.type, FLOAT)
    magnitude = builder.shl(builder.and_(word, _each(kind, 0x7FFF)), _each(kind, 13))
    # as a float32 this lacks 112 in its exponent; the product gives it, to denormals as well
    value = builder.bitcast(builder.fmul(builder.bitcast(magnitude, real), _each(real, 2.0**112)), kind)
    beyond = builder.icmp_unsigned(">=", magnitude, _each(kind, 0x1F << 23))
    value = builder.select(beyond, builder.or_(magnitude, _each(kind, 0xFF << 23)), value)
    sign = builder.shl(builder.and_(word, _each(kind, 0x8000)), _each(kind, 16))
    return builder.bitcast(builder.or_(value, sign), real)


def _to_half(builder: Any, x: Any) -> Any:
    """The nearest half float's bits, even when halfway, infinite from 65520 on; x is finite."""
    kind, real = _like(x.type, INT), x.type
    word = builder.bitcast(x, kind)
    magnitude = builder.and_(word, _each(kind, 0x7FFFFFFF))
    odd = builder.and_(builder.lshr(magnitude, _each(kind, 13)), _each(kind, 1))
    normal = builder.add(builder.sub(magnitude, _each(kind, (112 << 23) - 0xFFF)), odd)
    normal = builder.lshr(normal, _each(kind, 13))
    # the sum with 1/2 has its last bit where a half float's denormals have theirs
    shifted = builder.fadd(builder.bitcast(magnitude, real), _each(real, 0.5))
    denormal = builder.sub(builder.bitcast(shifted, kind), _each(kind, 126 << 23))
    value = builder.select(builder.icmp_unsigned("<", magnitude, _each(kind, 113 << 23)), denormal, normal)
    value = builder.select(builder.icmp_unsigned(">=", magnitude, _each(kind, 143 << 23)), _each(kind, 0x7C00), value)
    sign = builder.and_(builder.lshr(word, _each(kind, 16)), _each(kind, 0x8000))
    return builder.trunc(builder.or_(value, sign), _like(x.type, SHORT))


as_half = _function(types.float32, types.float32, lambda b, x: _from_half(b, b.zext(_to_half(b, x), INT)))  # rounded to one


def _to_bf16(builder: Any, x: Any) -> Any:
    """The nearest bf16's bits, even when halfway; NaN stays NaN."""
    kind = _like(x.type, INT)
    word = builder.bitcast(x, kind)
    upper = builder.lshr(word, _each(kind, 16))
    up = builder.add(builder.and_(upper, _each(kind, 1)), _each(kind, 0x7FFF))
    near = builder.lshr(builder.add(word, up), _each(kind, 16))
    kept = builder.select(builder.fcmp_unordered("uno", x, x), builder.or_(upper, _each(kind, 0x40)), near)
    return builder.trunc(kept, _like(x.type, SHORT))


def _from_bf16(builder: Any, word: Any) -> Any:
    return builder.bitcast(builder.shl(word, _each(word.type, 16)), _like(word.type, FLOAT))


# ---- memory: `name(pointer)`, `name(pointer, value)`; nothing need be aligned --------------------


@infer_global(operator.add)
class Offset(ConcreteTemplate):
    cases: ClassVar = [signature(BYTES, BYTES, types.int64)]


@lower_builtin(operator.add, BYTES, types.int64)
def _offset(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return builder.gep(args[0], [args[1]])


def _read(element: Any, gives: Any, change: Callable[[Any, Any], Any]) -> Any:
    kind = ir.VectorType(element, LANES) if isinstance(gives, Lanes) else element

    @intrinsic
    def load(typing_context: Any, pointer: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return change(builder, builder.load(builder.bitcast(args[0], kind.as_pointer()), align=1))

        return gives(BYTES), generate

    return load


def _write(takes: Any, change: Callable[[Any, Any], Any]) -> Any:
    @intrinsic
    def store(typing_context: Any, pointer: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            value = change(builder, args[1])
            builder.store(value, builder.bitcast(args[0], value.type.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(BYTES, takes), generate

    return store


def _widened(then: Callable[[Any, Any], Any] = lambda builder, word: word) -> Callable[[Any, Any], Any]:
    return lambda builder, value: then(builder, builder.zext(value, _like(value.type, INT)))


def _kept(builder: Any, value: Any) -> Any:
    return value


get_floats, put_floats = _read(FLOAT, FLOATS, _kept), _write(FLOATS, _kept)
get_halves, put_halves = _read(SHORT, FLOATS, _widened(_from_half)), _write(FLOATS, _to_half)
get_bf16s, put_bf16s = _read(SHORT, FLOATS, _widened(_from_bf16)), _write(FLOATS, _to_bf16)
get_bytes, put_bytes = _read(BYTE, WORDS, _widened()), _write(WORDS, lambda b, value: b.trunc(value, _like(value.type, BYTE)))
get_signed = _read(BYTE, WORDS, lambda builder, value: builder.sext(value, INTS))

get_float, put_float = _read(FLOAT, types.float32, _kept), _write(types.float32, _kept)
get_half, put_half = _read(SHORT, types.float32, _widened(_from_half)), _write(types.float32, _to_half)
get_bf16, put_bf16 = _read(SHORT, types.float32, _widened(_from_bf16)), _write(types.float32, _to_bf16)
get_byte = _read(BYTE, types.int64, lambda builder, value: builder.zext(value, ir.IntType(64)))
get_short = _read(SHORT, types.int64, lambda builder, value: builder.zext(value, ir.IntType(64)))
get_int8 = _read(BYTE, types.int64, lambda builder, value: builder.sext(value, ir.IntType(64)))
put_byte = _write(types.int64, lambda builder, value: builder.trunc(value, BYTE))
put_short = _write(types.int64, lambda builder, value: builder.trunc(value, SHORT))


@intrinsic
def real(typing_context: Any, number: Any) -> Any:
    """An integer as a float32."""
    return types.float32(types.int64), lambda context, builder, sig, args: builder.sitofp(args[0], FLOAT)


@intrinsic
def mask(typing_context: Any, words: Any) -> Any:
    """The lowest bit of each lane, as the lowest sixteen of a number."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lowest = builder.trunc(args[0], ir.VectorType(ir.IntType(1), LANES))
        return builder.zext(builder.bitcast(lowest, SHORT), ir.IntType(64))

    return types.int64(WORDS), generate
