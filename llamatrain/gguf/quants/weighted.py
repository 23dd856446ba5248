"""Encoding of finite float32 to Q4_0, Q4_1, Q5_0 and Q5_1 by importance: `w` is what each squared error is multiplied with.

The scale and the offset of a block are those of the extremes (encoding.py), or those that are fitted as in K-quants
(kquants.py), whichever give less error.
"""

from llamatrain.compiler.declare import U8, KernelEntry, exact
from llamatrain.compiler.vectors import vec16 as L
from llamatrain.gguf.quants import kinds as K
from llamatrain.gguf.quants.encoding import store_fifth_bits
from llamatrain.gguf.quants.kblocks import round_codes
from llamatrain.gguf.quants.kquants import fit_group, min_and_max, round_step, squared_error

SHAPES = {K.Q4_0: (-8, 7), K.Q5_0: (-16, 15), K.Q4_1: (0, 15), K.Q5_1: (0, 31)}  # lowest and highest code


@exact
def fit_extremes(x, low, top):
    """Return the scale and offset that follow from the extremes of a block."""
    least, largest = min_and_max(x, 2)
    if low == 0:
        return round_step((largest - least) / top, False), round_step(-least, True)
    return round_step((largest if largest > -least else least) / low, True), round_step(0.0, True)


@exact
def fit_block(x, w, low, top):
    """Return the better of two scales and offsets of a block."""
    scale, offset = fit_group(x, w, 2, low, top)
    scale, offset = round_step(scale, True), round_step(offset, True)
    plain, shift = fit_extremes(x, low, top)
    if squared_error(x, w, 2, plain, shift, low, top) < squared_error(x, w, 2, scale, offset, low, top):
        return plain, shift
    return scale, offset


@exact
def encode_block(kind, x, w, to, low, top):
    """Encode a block of 32 weights."""
    d, offset = fit_block(x, w, low, top)
    first = L.to_ints(round_codes(x, d, offset, low, top) - low)
    second = L.to_ints(round_codes(x + 64, d, offset, low, top) - low)
    L.put_half(to, d)
    at = to + 2
    if low == 0:
        L.put_half(at, -offset)
        at = at + 2
    if top - low > 15:
        store_fifth_bits(at, first, second)
        at = at + 4
    L.put_bytes(at, first & 15 | (second & 15) << 4)


@KernelEntry
def encode_weighted_rows(
    lo,
    hi,
    thread,
    kind,
    source: U8,
    source_pitch,
    target: U8,
    target_pitch,
    elements,
    importance: U8,
    importance_pitch,
    low,
    top,
):
    """Encode rows. A pitch is the distance between rows in bytes."""
    for row in range(lo, hi):
        for i in range(elements // 32):
            x, to = source + (row * source_pitch + 128 * i), target + (row * target_pitch + K.SIZE[kind] * i)
            w = importance + (row * importance_pitch + 128 * i)
            encode_block(kind, x, w, to, low, top)
