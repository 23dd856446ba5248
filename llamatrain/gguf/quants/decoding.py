"""Decoding of quantized blocks to float32 or bf16: helpers for compiled code, and an entry for rows.

`decode_blocks(kind, to, bf16, source, elements)` decodes consecutive whole blocks, such as a part of a row;
`kind` is the number of the type. Each function of a block follows ggml's layout of that name: d is a scale, m
is an offset, q are the codes.
"""

from llamatrain.compiler.declare import U8, KernelEntry, LazyCompiled, exact
from llamatrain.compiler.vectors import vec16 as L
from llamatrain.gguf.quants import kinds as K

NON_LINEAR = LazyCompiled(lambda: L.make_lookup(K.IQ4_VALUES))
FOUR_BIT_FLOATS = LazyCompiled(lambda: L.make_lookup(K.MXFP4_VALUES))
# Where scales and mins of Q4_K and Q5_K, by fours, have their lower and upper bits (put_q4_k_scales).
LOW_BYTES = LazyCompiled(lambda: L.make_permutation([at + i for at in (0, 8, 4, 8) for i in range(4)]))
HIGH_BYTES = LazyCompiled(lambda: L.make_permutation([at + i for at in (0, 0, 4, 4) for i in range(4)]))
LOW_SHIFTS = LazyCompiled(lambda: L.make_words([0] * 12 + [4] * 4))
LOW_MASKS = LazyCompiled(lambda: L.make_words(([63] * 4 + [15] * 4) * 2))
HIGH_MASKS = LazyCompiled(lambda: L.make_words(([0] * 4 + [48] * 4) * 2))
SMALLEST_SCALE = 1 << 21  # the bits of the smallest scale of MXFP4, which is no normal number


@exact
def store16(to, bf16, at, value):
    """Store 16 numbers at an index, as float32 or bf16."""
    if bf16:
        L.put_bf16s(to + 2 * at, value)
    else:
        L.put_floats(to + 4 * at, value)


# ---- blocks of 32 -------------------------------------------------------------------------------


@exact
def q4_0(block, to, bf16):
    """Decode a block of Q4_0."""
    d, q = L.get_half(block), L.get_bytes(block + 2)
    store16(to, bf16, 0, d * L.to_floats((q & 15) - 8))
    store16(to, bf16, 16, d * L.to_floats((q >> 4) - 8))


@exact
def q4_1(block, to, bf16):
    """Decode a block of Q4_1."""
    d, m, q = L.get_half(block), L.get_half(block + 2), L.get_bytes(block + 4)
    store16(to, bf16, 0, d * L.to_floats(q & 15) + m)
    store16(to, bf16, 16, d * L.to_floats(q >> 4) + m)


@exact
def q5_0(block, to, bf16):
    """Decode a block of Q5_0."""
    d, q = L.get_half(block), L.get_bytes(block + 6)
    low, high = L.unpack_bits(L.get_short(block + 2)), L.unpack_bits(L.get_short(block + 4))
    store16(to, bf16, 0, d * L.to_floats((q & 15 | low << 4) - 16))
    store16(to, bf16, 16, d * L.to_floats((q >> 4 | high << 4) - 16))


@exact
def q5_1(block, to, bf16):
    """Decode a block of Q5_1."""
    d, m, q = L.get_half(block), L.get_half(block + 2), L.get_bytes(block + 8)
    low, high = L.unpack_bits(L.get_short(block + 4)), L.unpack_bits(L.get_short(block + 6))
    store16(to, bf16, 0, d * L.to_floats(q & 15 | low << 4) + m)
    store16(to, bf16, 16, d * L.to_floats(q >> 4 | high << 4) + m)


@exact
def q8_0(block, to, bf16):
    """Decode a block of Q8_0."""
    d = L.get_half(block)
    store16(to, bf16, 0, L.to_floats(L.get_signed(block + 2)) * d)
    store16(to, bf16, 16, L.to_floats(L.get_signed(block + 18)) * d)


@exact
def iq4_nl(block, to, bf16):
    """Decode a block of IQ4_NL."""
    d, q = L.get_half(block), L.get_bytes(block + 2)
    store16(to, bf16, 0, d * NON_LINEAR(q & 15))
    store16(to, bf16, 16, d * NON_LINEAR(q >> 4))


@exact
def mxfp4(block, to, bf16):
    """Decode a block of MXFP4: four-bit floats, and a power of two whose exponent is a byte."""
    exponent, q = L.get_byte(block), L.get_bytes(block + 1)
    d = L.bits_to_float(SMALLEST_SCALE << exponent if exponent < 2 else (exponent - 1) << 23)
    store16(to, bf16, 0, d * FOUR_BIT_FLOATS(q & 15))
    store16(to, bf16, 16, d * FOUR_BIT_FLOATS(q >> 4))


# ---- blocks of 256, by sixteens -----------------------------------------------------------------


@exact
def q2_k(block, to, bf16):
    """Decode a block of Q2_K."""
    d, dmin = L.get_half(block + 80), L.get_half(block + 82)
    for i in range(16):
        half, shift, part = i // 8, i % 8 // 2, i % 2
        q = L.get_bytes(block + 16 + 32 * half + 16 * part) >> 2 * shift & 3
        scale = L.get_byte(block + i)
        store16(to, bf16, 16 * i, d * L.to_float(scale & 15) * L.to_floats(q) - dmin * L.to_float(scale >> 4))


@exact
def q3_k_scale(scales, i):
    """Return the i-th of sixteen 6-bit scales: the low four bits in eight bytes, the high two in four more."""
    return (
        L.get_byte(scales + i % 8) >> 4 * (i // 8) & 15
        | (L.get_byte(scales + 8 + i % 4) >> 2 * (i // 4) & 3) << 4
    )


@exact
def q3_k(block, to, bf16):
    """Decode a block of Q3_K."""
    d = L.get_half(block + 108)
    for i in range(16):
        half, shift, part = i // 8, i % 8 // 2, i % 2
        low = L.get_bytes(block + 32 + 32 * half + 16 * part) >> 2 * shift & 3
        high = L.get_bytes(block + 16 * part) >> (i // 2) & 1
        scale = q3_k_scale(block + 96, i) - 32
        store16(to, bf16, 16 * i, d * L.to_float(scale) * L.to_floats((low | high << 2) - 4))


@exact
def put_q4_k_scales(to, block):
    """Store d times the eight 6-bit scales of a block, and dmin times its eight mins, as 16 floats.

    Of the first four of each, 6 bits lie in one byte; of the others, 4 bits in one and 2 in another.
    """
    packed = L.get_bytes(block + 4)
    low = LOW_BYTES(packed) >> LOW_SHIFTS() & LOW_MASKS()
    high = HIGH_BYTES(packed) >> 6 << 4 & HIGH_MASKS()
    L.put_floats(to, L.splat_halves(L.get_half(block), L.get_half(block + 2)) * L.to_floats(low | high))


@exact
def q4_k(block, to, bf16):
    """Decode a block of Q4_K."""
    scales = L.local_vector()
    put_q4_k_scales(scales, block)
    mins = scales + 4 * 8
    for i in range(0, 8, 2):
        for part in range(2):
            q, at = L.get_bytes(block + 16 + 16 * i + 16 * part), 32 * i + 16 * part
            low, high = L.to_floats(q & 15), L.to_floats(q >> 4)
            store16(to, bf16, at, L.get_float(scales + 4 * i) * low - L.get_float(mins + 4 * i))
            store16(to, bf16, at + 32, L.get_float(scales + 4 * i + 4) * high - L.get_float(mins + 4 * i + 4))


@exact
def q5_k(block, to, bf16):
    """Decode a block of Q5_K."""
    scales = L.local_vector()
    put_q4_k_scales(scales, block)
    mins = scales + 4 * 8
    for i in range(8):
        scale, m = L.get_float(scales + 4 * i), L.get_float(mins + 4 * i)
        for part in range(2):
            low = L.get_bytes(block + 48 + 32 * (i // 2) + 16 * part) >> 4 * (i % 2) & 15
            high = L.get_bytes(block + 16 + 16 * part) >> i & 1
            store16(to, bf16, 32 * i + 16 * part, scale * L.to_floats(low | high << 4) - m)


@exact
def q6_k(block, to, bf16):
    """Decode a block of Q6_K."""
    d = L.get_half(block + 208)
    for i in range(16):
        half, quarter, part = i // 8, i % 8 // 2, i % 2
        low = L.get_bytes(block + 64 * half + 32 * (quarter % 2) + 16 * part) >> 4 * (quarter // 2) & 15
        high = L.get_bytes(block + 128 + 32 * half + 16 * part) >> 2 * quarter & 3
        store16(
            to,
            bf16,
            16 * i,
            d * L.to_float(L.get_int8(block + 192 + i)) * L.to_floats((low | high << 4) - 32),
        )


@exact
def iq4_xs(block, to, bf16):
    """Decode a block of IQ4_XS."""
    d, high = L.get_half(block), L.get_short(block + 2)
    for i in range(8):
        scale = L.get_byte(block + 4 + i // 2) >> 4 * (i % 2) & 15 | (high >> 2 * i & 3) << 4
        q = L.get_bytes(block + 8 + 16 * i)
        store16(to, bf16, 32 * i, d * L.to_float(scale - 32) * NON_LINEAR(q & 15))
        store16(to, bf16, 32 * i + 16, d * L.to_float(scale - 32) * NON_LINEAR(q >> 4))


# ---- a run of blocks ----------------------------------------------------------------------------


@exact
def decode_block32(kind, block, to, bf16):
    """Decode a block of 32 weights."""
    if kind == K.Q4_0:
        q4_0(block, to, bf16)
    elif kind == K.Q4_1:
        q4_1(block, to, bf16)
    elif kind == K.Q5_0:
        q5_0(block, to, bf16)
    elif kind == K.Q5_1:
        q5_1(block, to, bf16)
    elif kind == K.Q8_0:
        q8_0(block, to, bf16)
    elif kind == K.IQ4_NL:
        iq4_nl(block, to, bf16)
    elif kind == K.MXFP4:
        mxfp4(block, to, bf16)


@exact
def decode_block256(kind, block, to, bf16):
    """Decode a block of 256 weights."""
    if kind == K.Q2_K:
        q2_k(block, to, bf16)
    elif kind == K.Q3_K:
        q3_k(block, to, bf16)
    elif kind == K.Q4_K:
        q4_k(block, to, bf16)
    elif kind == K.Q5_K:
        q5_k(block, to, bf16)
    elif kind == K.Q6_K:
        q6_k(block, to, bf16)
    elif kind == K.IQ4_XS:
        iq4_xs(block, to, bf16)


@exact
def load16(kind, source):
    """Load 16 floats of F32, F16 or BF16."""
    if kind == K.F16:
        return L.get_halves(source)
    return L.get_bf16s(source) if kind == K.BF16 else L.get_floats(source)


@exact
def load1(kind, source):
    """Load one float of F32, F16 or BF16."""
    if kind == K.F16:
        return L.get_half(source)
    return L.get_bf16(source) if kind == K.BF16 else L.get_float(source)


@exact
def convert_floats(kind, to, bf16, source, elements):
    """Convert F32, F16 or BF16 of any length."""
    size, done = 4 if kind == K.F32 else 2, elements // 16 * 16
    for i in range(0, done, 16):
        store16(to, bf16, i, load16(kind, source + i * size))
    for i in range(done, elements):
        if bf16:
            L.put_bf16(to + 2 * i, load1(kind, source + i * size))
        else:
            L.put_float(to + 4 * i, load1(kind, source + i * size))


@exact
def decode_blocks(kind, to, bf16, source, elements):
    """Decode `elements` weights, whole blocks, from `source` to float32 or (bf16 = 1) bf16 at `to`."""
    block, size, width = K.BLOCK[kind], K.SIZE[kind], 2 if bf16 else 4
    if block == 1:
        convert_floats(kind, to, bf16, source, elements)
    elif block == 32:
        for i in range(elements // 32):
            decode_block32(kind, source + i * size, to + i * 32 * width, bf16)
    else:
        for i in range(elements // 256):
            decode_block256(kind, source + i * size, to + i * 256 * width, bf16)


@KernelEntry
def decode_rows(lo, hi, thread, kind, bf16, source: U8, source_pitch, to: U8, to_pitch, elements):
    """Decode rows. A pitch is the distance between rows in bytes."""
    for row in range(lo, hi):
        decode_blocks(kind, to + row * to_pitch, bf16, source + row * source_pitch, elements)
