"""Writes blocks of K-quants. `counts` and `best` hold the scale and offset of each group (kquants.py)."""

from numpy import float32

from llamatrain.compiler.declare import exact
from llamatrain.compiler.vectors import vec16 as L
from llamatrain.gguf.quants import kinds as K


@exact
def round_codes(x, scale, offset, low, top):
    """Return 16 codes, as floats."""
    per_scale = float32(1.0) / scale if scale != 0 else float32(0.0)
    return L.maximum(L.minimum(L.round_to_nearest((L.get_floats(x) + offset) * per_scale), top), low)


@exact
def codes16(x, i, vectors, d, dmin, counts, low, top):
    """Return the codes of the i-th 16 weights, from 0 up."""
    scale, offset = d * L.to_float(counts[0, i // vectors]), dmin * L.to_float(counts[1, i // vectors])
    return L.to_ints(round_codes(x + 64 * i, scale, offset, low, top) - low)


@exact
def store_4_bits(x, to, high, d, dmin, counts, top):
    """Store four bits of two groups' codes in each byte; a fifth bit, if any, in 32 bytes at `high`."""
    for part in range(2):
        fifth = L.get_bytes(to) & 0
        for i in range(0, 8, 2):
            first = codes16(x, 2 * i + part, 2, d, dmin, counts, 0, top)
            second = codes16(x, 2 * i + 2 + part, 2, d, dmin, counts, 0, top)
            L.put_bytes(to + (16 * i + 16 * part), first & 15 | second << 4)
            fifth |= first >> 4 << i | second >> 4 << (i + 1)
        if top > 15:
            L.put_bytes(high + 16 * part, fifth)


@exact
def store_2_bits(x, to, d, dmin, counts, low, top):
    """Store the lowest two bits of four groups' codes in each byte."""
    for i in range(4):
        half, part = i // 2, i % 2
        packed = L.get_bytes(to) & 0
        for quarter in range(4):
            packed |= (
                codes16(x, 8 * half + 2 * quarter + part, 1, d, dmin, counts, low, top) & 3
            ) << 2 * quarter
        L.put_bytes(to + 16 * i, packed)


@exact
def store_q4_k_scales(to, counts):
    """Store eight scales and eight offsets of 6 bits in 12 bytes."""
    for i in range(4):
        scale, offset = counts[0, i + 4], counts[1, i + 4]
        L.put_byte(to + i, counts[0, i] | scale >> 4 << 6)
        L.put_byte(to + (4 + i), counts[1, i] | offset >> 4 << 6)
        L.put_byte(to + (8 + i), scale & 15 | (offset & 15) << 4)


@exact
def q4_k(x, to, d, dmin, best):
    """Write a block of Q4_K."""
    L.put_half(to, d)
    L.put_half(to + 2, dmin)
    store_q4_k_scales(to + 4, best)
    store_4_bits(x, to + 16, to, d, dmin, best, 15)


@exact
def q5_k(x, to, d, dmin, best):
    """Write a block of Q5_K."""
    L.put_half(to, d)
    L.put_half(to + 2, dmin)
    store_q4_k_scales(to + 4, best)
    store_4_bits(x, to + 48, to + 16, d, dmin, best, 31)


@exact
def q2_k(x, to, d, dmin, best):
    """Write a block of Q2_K."""
    for i in range(16):
        L.put_byte(to + i, best[0, i] | best[1, i] << 4)
    store_2_bits(x, to + 16, d, dmin, best, 0, 3)
    L.put_half(to + 80, d)
    L.put_half(to + 82, dmin)


@exact
def q3_k(x, to, d, dmin, best):
    """Write a block of Q3_K."""
    for part in range(2):
        third = L.get_bytes(to) & 0
        for i in range(8):
            third |= codes16(x, 2 * i + part, 1, d, dmin, best, -4, 3) >> 2 << i
        L.put_bytes(to + 16 * part, third)
    store_2_bits(x, to + 32, d, dmin, best, -4, 3)
    for i in range(8):
        L.put_byte(to + (96 + i), best[0, i] + 32 & 15 | (best[0, i + 8] + 32 & 15) << 4)
    for i in range(4):
        high = 0
        for j in range(4):
            high |= best[0, i + 4 * j] + 32 >> 4 << 2 * j
        L.put_byte(to + (104 + i), high)
    L.put_half(to + 108, d)


@exact
def q6_k(x, to, d, dmin, best):
    """Write a block of Q6_K."""
    for i in range(4):
        half, part = i // 2, i % 2
        high = L.get_bytes(to) & 0
        for pair in range(2):
            first = codes16(x, 8 * half + 2 * pair + part, 1, d, dmin, best, -32, 31)
            second = codes16(x, 8 * half + 2 * pair + 4 + part, 1, d, dmin, best, -32, 31)
            L.put_bytes(to + (64 * half + 32 * pair + 16 * part), first & 15 | (second & 15) << 4)
            high |= first >> 4 << 2 * pair | second >> 4 << (2 * pair + 4)
        L.put_bytes(to + (128 + 16 * i), high)
    for i in range(16):
        L.put_byte(to + (192 + i), best[0, i])
    L.put_half(to + 208, d)


@exact
def write_block(kind, x, to, d, dmin, best):
    """Write a block of a K-quant type."""
    if kind == K.Q2_K:
        q2_k(x, to, d, dmin, best)
    elif kind == K.Q3_K:
        q3_k(x, to, d, dmin, best)
    elif kind == K.Q4_K:
        q4_k(x, to, d, dmin, best)
    elif kind == K.Q5_K:
        q5_k(x, to, d, dmin, best)
    elif kind == K.Q6_K:
        q6_k(x, to, d, dmin, best)
