"""What is said to LLVM's builder again and again: constants, calls, splats, masks, bfloat16, of numbers and of vectors alike."""

from typing import Any

from llvmlite import ir
from numba.core import cgutils

VOID, BIT, BYTE, SHORT, INT, LONG = ir.VoidType(), *(ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
FLOAT, DOUBLE = ir.FloatType(), ir.DoubleType()
POINTER = BYTE.as_pointer()
NAMES = {FLOAT: "f32", SHORT: "i16"}
NO_MINUS_ZERO = (
    "nsz",
)  # beside its meaning, any flag keeps away the pass that gives arithmetic its caller's flags


def like(kind: Any, element: Any) -> Any:
    """Another element, in lanes if `kind` has them."""
    return ir.VectorType(element, kind.count) if isinstance(kind, ir.VectorType) else element


def each(kind: Any, number: float) -> Any:
    """A constant, in every lane if there are lanes."""
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


def name_of(kind: Any) -> str:
    """As LLVM's intrinsics are named: f32, v16f32, v16i16."""
    return f"v{kind.count}{NAMES[kind.element]}" if isinstance(kind, ir.VectorType) else NAMES[kind]


def call(builder: Any, name: str, gives: Any, *values: Any) -> Any:
    kind = ir.FunctionType(gives, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def of_itself(builder: Any, name: str, *values: Any) -> Any:
    """An intrinsic whose values and result are of one kind, which its name tells."""
    kind = values[0].type
    return call(builder, f"llvm.{name}.{name_of(kind)}", kind, *values)


def splat(builder: Any, value: Any, kind: Any) -> Any:
    """A number in every lane, made the lanes' element first; a vector as it is."""
    if isinstance(value.type, ir.VectorType):
        return value
    if value.type != kind.element:
        made = (
            builder.trunc
            if kind.element == INT
            else builder.fptrunc
            if value.type == DOUBLE
            else builder.sitofp
        )
        value = made(value, kind.element)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, INT(0))
    return builder.shuffle_vector(one, one, each(like(kind, INT), 0))


def reduced(builder: Any, name: str, x: Any, start: tuple[float, ...], flags: set[str]) -> Any:
    """One number of all lanes."""
    made = call(builder, f"llvm.vector.reduce.{name}.{name_of(x.type)}", FLOAT, *map(FLOAT, start), x)
    made.fastmath.update(flags)
    return made


# ---- memory ---------------------------------------------------------------------------------------


def pointer(builder: Any, address: Any, kind: Any) -> Any:
    """An address, an integer or a pointer already, as one to this kind."""
    made = builder.inttoptr if isinstance(address.type, ir.IntType) else builder.bitcast
    return made(address, kind.as_pointer())


def load(builder: Any, address: Any, kind: Any, align: int) -> Any:
    return builder.load(pointer(builder, address, kind), align=align)


def store(builder: Any, value: Any, address: Any, align: int) -> Any:
    return builder.store(value, pointer(builder, address, value.type), align=align)


def first_lanes(builder: Any, count: Any, lanes: int) -> Any:
    """A mask of the first `count`."""
    kind = ir.VectorType(INT, lanes)
    return builder.icmp_signed(
        "<", ir.Constant(kind, list(range(lanes))), splat(builder, builder.trunc(count, INT), kind)
    )


def masked_load(builder: Any, address: Any, kind: Any, align: int, mask: Any) -> Any:
    """Zeros where the mask has none; the memory there is not touched."""
    rest = (INT(align), mask, each(kind, 0))
    return call(builder, f"llvm.masked.load.{name_of(kind)}.p0", kind, pointer(builder, address, kind), *rest)


def masked_store(builder: Any, value: Any, address: Any, align: int, mask: Any) -> None:
    place = pointer(builder, address, value.type)
    call(builder, f"llvm.masked.store.{name_of(value.type)}.p0", VOID, value, place, INT(align), mask)


# ---- bfloat16: the upper half of a float32 ----------------------------------------------------------


def rounded(builder: Any, x: Any) -> Any:
    """Words whose upper half is the nearest bfloat16, even when halfway; NaN stays NaN. The lower half is noise."""
    kind = like(x.type, INT)
    bits = builder.bitcast(x, kind)
    odd = builder.and_(builder.lshr(bits, each(kind, 16)), each(kind, 1))
    nearest = builder.add(bits, builder.add(odd, each(kind, 0x7FFF)))
    quiet = builder.or_(bits, each(kind, 0x400000))
    return builder.select(builder.fcmp_unordered("uno", x, x, flags=NO_MINUS_ZERO), quiet, nearest)


def lower_half(builder: Any, words: Any) -> Any:
    return builder.lshr(words, each(words.type, 16))


def upper_half(builder: Any, words: Any) -> Any:
    return builder.and_(words, each(words.type, 0xFFFF0000))


def to_bf16(builder: Any, x: Any) -> Any:
    return builder.trunc(lower_half(builder, rounded(builder, x)), like(x.type, SHORT))


def raised(builder: Any, halves: Any) -> Any:
    """16 bits as the upper half of words."""
    words = like(halves.type, INT)
    return builder.shl(builder.zext(halves, words), each(words, 16))


def from_bf16(builder: Any, halves: Any) -> Any:
    return builder.bitcast(raised(builder, halves), like(halves.type, FLOAT))
