"""Common uses of LLVM's builder, for numbers and vectors alike: constants, calls, splats, masks, bfloat16."""

from typing import Any

from llvmlite import ir
from numba.core import cgutils

VOID, BIT, BYTE, SHORT, INT, LONG = ir.VoidType(), *(ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
FLOAT, DOUBLE = ir.FloatType(), ir.DoubleType()
POINTER = BYTE.as_pointer()
NAMES = {FLOAT: "f32", SHORT: "i16"}
NO_MINUS_ZERO = ("nsz",)  # any flag also keeps the pass away that gives arithmetic its caller's flags


def with_element(kind: Any, element: Any) -> Any:
    """Return a type with another element, a vector if `kind` is one."""
    return ir.VectorType(element, kind.count) if isinstance(kind, ir.VectorType) else element


def constant(kind: Any, number: float) -> Any:
    """Return a constant, in every lane of a vector type."""
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


def type_suffix(kind: Any) -> str:
    """Return a type's suffix in names of LLVM intrinsics: f32, v16f32, v16i16."""
    return f"v{kind.count}{NAMES[kind.element]}" if isinstance(kind, ir.VectorType) else NAMES[kind]


def call(builder: Any, name: str, gives: Any, *values: Any) -> Any:
    """Call an external function."""
    kind = ir.FunctionType(gives, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def call_intrinsic(builder: Any, name: str, *values: Any) -> Any:
    """Call an LLVM intrinsic whose arguments and result have one type."""
    kind = values[0].type
    return call(builder, f"llvm.{name}.{type_suffix(kind)}", kind, *values)


def splat(builder: Any, value: Any, kind: Any) -> Any:
    """Return a vector with a number in every lane, converted to its element type.

    A vector is returned as it is.
    """
    if isinstance(value.type, ir.VectorType):
        return value
    if value.type != kind.element:
        convert = (
            builder.trunc
            if kind.element == INT
            else builder.fptrunc
            if value.type == DOUBLE
            else builder.sitofp
        )
        value = convert(value, kind.element)
    first_lane = builder.insert_element(ir.Constant(kind, ir.Undefined), value, INT(0))
    return builder.shuffle_vector(first_lane, first_lane, constant(with_element(kind, INT), 0))


def reduce_lanes(builder: Any, name: str, x: Any, start: tuple[float, ...], flags: set[str]) -> Any:
    """Reduce all lanes to one number."""
    result = call(builder, f"llvm.vector.reduce.{name}.{type_suffix(x.type)}", FLOAT, *map(FLOAT, start), x)
    result.fastmath.update(flags)
    return result


# ---- memory ---------------------------------------------------------------------------------------


def pointer(builder: Any, address: Any, kind: Any) -> Any:
    """Convert an address, an integer or a pointer, to a pointer to a type."""
    convert = builder.inttoptr if isinstance(address.type, ir.IntType) else builder.bitcast
    return convert(address, kind.as_pointer())


def load(builder: Any, address: Any, kind: Any, align: int) -> Any:
    """Load a value from an address."""
    return builder.load(pointer(builder, address, kind), align=align)


def store(builder: Any, value: Any, address: Any, align: int) -> Any:
    """Store a value at an address."""
    return builder.store(value, pointer(builder, address, value.type), align=align)


def first_lanes(builder: Any, count: Any, lanes: int) -> Any:
    """Return a mask of the first `count` lanes."""
    kind = ir.VectorType(INT, lanes)
    return builder.icmp_signed(
        "<", ir.Constant(kind, list(range(lanes))), splat(builder, builder.trunc(count, INT), kind)
    )


def masked_load(builder: Any, address: Any, kind: Any, align: int, mask: Any) -> Any:
    """Load the lanes of a mask; others are zero, and their memory is not read."""
    rest = (INT(align), mask, constant(kind, 0))
    return call(
        builder, f"llvm.masked.load.{type_suffix(kind)}.p0", kind, pointer(builder, address, kind), *rest
    )


def masked_store(builder: Any, value: Any, address: Any, align: int, mask: Any) -> None:
    """Store the lanes of a mask."""
    target = pointer(builder, address, value.type)
    call(builder, f"llvm.masked.store.{type_suffix(value.type)}.p0", VOID, value, target, INT(align), mask)


# ---- bfloat16: the upper half of a float32 ----------------------------------------------------------


def round_to_upper_half(builder: Any, x: Any) -> Any:
    """Return words whose upper half is the nearest bfloat16, ties to even; NaN stays NaN.

    The lower half is undefined.
    """
    kind = with_element(x.type, INT)
    bits = builder.bitcast(x, kind)
    odd = builder.and_(builder.lshr(bits, constant(kind, 16)), constant(kind, 1))
    nearest = builder.add(bits, builder.add(odd, constant(kind, 0x7FFF)))
    quiet = builder.or_(bits, constant(kind, 0x400000))
    return builder.select(builder.fcmp_unordered("uno", x, x, flags=NO_MINUS_ZERO), quiet, nearest)


def lower_half(builder: Any, words: Any) -> Any:
    """Shift the upper half of words down."""
    return builder.lshr(words, constant(words.type, 16))


def upper_half(builder: Any, words: Any) -> Any:
    """Clear the lower half of words."""
    return builder.and_(words, constant(words.type, 0xFFFF0000))


def to_bf16(builder: Any, x: Any) -> Any:
    """Round float32 to bfloat16."""
    return builder.trunc(lower_half(builder, round_to_upper_half(builder, x)), with_element(x.type, SHORT))


def widen_to_upper_half(builder: Any, halves: Any) -> Any:
    """Return 16-bit values as the upper half of words."""
    words = with_element(halves.type, INT)
    return builder.shl(builder.zext(halves, words), constant(words, 16))


def from_bf16(builder: Any, halves: Any) -> Any:
    """Convert bfloat16 to float32."""
    return builder.bitcast(widen_to_upper_half(builder, halves), with_element(halves.type, FLOAT))
