"""Encoding of finite float32 to types whose scale follows from a block's extremes, with the bytes of the `gguf` package.

Each function encodes the block of floats at `x` to the bytes at `to`.
"""

import numpy as np
from numpy import float32

from llamatrain.compiler.declare import U8, KernelEntry, exact
from llamatrain.compiler.vectors import vec16 as L
from llamatrain.gguf.quants import kinds as K


@exact
def peak(x):
    """Return the first of 32 values with the largest absolute value."""
    largest = L.get_float(x)
    for i in range(1, 32):
        value = L.get_float(x + 4 * i)
        if abs(value) > abs(largest):
            largest = value
    return largest


@exact
def inverse(d):
    """Return 1 / d, or 0 for 0."""
    return float32(1.0) / d if d != 0 else float32(0.0)


@exact
def codes(x, shift, d, half, top):
    """Return (x - shift) / d + half as 16 integers of at most `top`.

    If 1 / d overflows, d is 0 as a half float, and so are the codes.
    """
    per_d = inverse(d)
    if abs(per_d) == float32(np.inf):
        return L.to_ints(L.get_floats(x) * 0.0)
    return L.to_ints(L.minimum((L.get_floats(x) - shift) * per_d + half, top))


@exact
def store_fifth_bits(to, low, high):
    """Store the fifth bits of 32 codes."""
    L.put_short(to, L.pack_bits(low >> 4))
    L.put_short(to + 2, L.pack_bits(high >> 4))


@exact
def q4_0(x, to):
    """Encode a block as Q4_0."""
    d = peak(x) / float32(-8.0)
    L.put_half(to, d)
    L.put_bytes(to + 2, codes(x, float32(0.0), d, 8.5, 15.0) | codes(x + 64, float32(0.0), d, 8.5, 15.0) << 4)


@exact
def q5_0(x, to):
    """Encode a block as Q5_0."""
    d = peak(x) / float32(-16.0)
    low, high = codes(x, float32(0.0), d, 16.5, 31.0), codes(x + 64, float32(0.0), d, 16.5, 31.0)
    L.put_half(to, d)
    store_fifth_bits(to + 2, low, high)
    L.put_bytes(to + 6, low & 15 | high << 4)


@exact
def min_and_max(x):
    """Return the smallest and the largest of 32 values."""
    low, high = L.get_floats(x), L.get_floats(x + 64)
    return L.reduce_min(L.minimum(low, high)), L.reduce_max(L.maximum(low, high))


@exact
def q4_1(x, to):
    """Encode a block as Q4_1."""
    least, largest = min_and_max(x)
    d = (largest - least) / float32(15.0)
    L.put_half(to, d)
    L.put_half(to + 2, least)
    L.put_bytes(to + 4, codes(x, least, d, 0.5, 15.0) | codes(x + 64, least, d, 0.5, 15.0) << 4)


@exact
def q5_1(x, to):
    """Encode a block as Q5_1."""
    least, largest = min_and_max(x)
    d = (largest - least) / float32(31.0)
    low, high = codes(x, least, d, 0.5, 31.0), codes(x + 64, least, d, 0.5, 31.0)
    L.put_half(to, d)
    L.put_half(to + 2, least)
    store_fifth_bits(to + 4, low, high)
    L.put_bytes(to + 8, low & 15 | high << 4)


@exact
def round_codes(x, d):
    """Return 16 values in units of d, halves rounded away from zero."""
    per_d = inverse(d)
    if per_d == float32(np.inf):
        return L.to_ints(L.get_floats(x) * 0.0)
    value = L.get_floats(x) * per_d
    size = L.absolute(value)
    down = L.floor(size)
    return L.to_ints(L.copy_sign(down + L.floor((size - down) * 2.0), value))


@exact
def q8_0(x, to):
    """Encode a block as Q8_0."""
    d = abs(peak(x)) / float32(127.0)
    L.put_half(to, d)
    L.put_bytes(to + 2, round_codes(x, d))
    L.put_bytes(to + 18, round_codes(x + 64, d))


@exact
def encode_halves(x, to, elements, bf16):
    """Encode F16 or BF16 of any length."""
    done = elements // 16 * 16
    for i in range(0, done, 16):
        value = L.get_floats(x + 4 * i)
        if bf16:
            L.put_bf16s(to + 2 * i, value)
        else:
            L.put_halves(to + 2 * i, value)
    for i in range(done, elements):
        one = L.get_float(x + 4 * i)
        if bf16:
            L.put_bf16(to + 2 * i, one)
        else:
            L.put_half(to + 2 * i, one)


@KernelEntry
def encode_rows(lo, hi, thread, kind, source: U8, source_pitch, target: U8, target_pitch, elements):
    """Encode rows. A pitch is the distance between rows in bytes."""
    for row in range(lo, hi):
        first, out = source + row * source_pitch, target + row * target_pitch
        if kind in (K.F16, K.BF16):
            encode_halves(first, out, elements, kind == K.BF16)
        else:
            for i in range(elements // 32):
                x, to = first + 128 * i, out + K.SIZE[kind] * i
                if kind == K.Q4_0:
                    q4_0(x, to)
                elif kind == K.Q4_1:
                    q4_1(x, to)
                elif kind == K.Q5_0:
                    q5_0(x, to)
                elif kind == K.Q5_1:
                    q5_1(x, to)
                elif kind == K.Q8_0:
                    q8_0(x, to)
