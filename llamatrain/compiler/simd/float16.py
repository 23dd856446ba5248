"""Half-precision floats by integer arithmetic, which every processor has, for numbers and vectors."""

from typing import Any

from llamatrain.compiler.simd.llvm_ops import FLOAT, INT, SHORT, constant, with_element


def from_half(builder: Any, word: Any) -> Any:
    """Return the float32 of the 16 bits in an i32."""
    kind, real = word.type, with_element(word.type, FLOAT)
    magnitude = builder.shl(builder.and_(word, constant(kind, 0x7FFF)), constant(kind, 13))
    # as float32 the exponent lacks 112; the product adds it, also for denormals
    value = builder.bitcast(builder.fmul(builder.bitcast(magnitude, real), constant(real, 2.0**112)), kind)
    beyond = builder.icmp_unsigned(">=", magnitude, constant(kind, 0x1F << 23))
    value = builder.select(beyond, builder.or_(magnitude, constant(kind, 0xFF << 23)), value)
    sign = builder.shl(builder.and_(word, constant(kind, 0x8000)), constant(kind, 16))
    return builder.bitcast(builder.or_(value, sign), real)


def to_half(builder: Any, x: Any) -> Any:
    """Return the bits of the nearest half float, ties to even, infinity from 65520 on; x is finite."""
    kind, real = with_element(x.type, INT), x.type
    word = builder.bitcast(x, kind)
    magnitude = builder.and_(word, constant(kind, 0x7FFFFFFF))
    odd = builder.and_(builder.lshr(magnitude, constant(kind, 13)), constant(kind, 1))
    normal = builder.add(builder.sub(magnitude, constant(kind, (112 << 23) - 0xFFF)), odd)
    normal = builder.lshr(normal, constant(kind, 13))
    # the last bit of the sum with 1/2 is where a half float's denormals have theirs
    shifted = builder.fadd(builder.bitcast(magnitude, real), constant(real, 0.5))
    denormal = builder.sub(builder.bitcast(shifted, kind), constant(kind, 126 << 23))
    value = builder.select(builder.icmp_unsigned("<", magnitude, constant(kind, 113 << 23)), denormal, normal)
    value = builder.select(
        builder.icmp_unsigned(">=", magnitude, constant(kind, 143 << 23)), constant(kind, 0x7C00), value
    )
    sign = builder.and_(builder.lshr(word, constant(kind, 16)), constant(kind, 0x8000))
    return builder.trunc(builder.or_(value, sign), with_element(x.type, SHORT))
