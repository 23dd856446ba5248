"""Encoding of finite float32 to IQ4_NL and IQ4_XS: codes stand for 16 numbers, denser around zero, times a scale for 32 weights.

A scale is found as for K-quants (kquants.py): guesses from the weight with the largest absolute value, each
improved in turns: the nearest numbers, then the scale that fits those best (least squares). IQ4_XS stores the
scales of 8 groups as multiples of a step d. From the largest scale come some guesses of d; for each, every
group takes the best multiple near its real scale, and d is fitted to the multiples. `w` has the importance of each
weight: what its squared error is multiplied with.
"""

import numpy as np
from numpy import float32

from llamatrain.compiler.declare import U8, KernelEntry, LazyCompiled, exact
from llamatrain.compiler.vectors import vec16 as L
from llamatrain.gguf.quants import kinds as K
from llamatrain.gguf.quants.kquants import round_step

GUESSES, SPACING, REFITS, ROUNDS = 12, 3.0, 2, 2
LARGEST_COUNTS = (-32, -31, 31)  # possible multiples for the largest of 8 scales
MIN_COUNT, MAX_COUNT = -32, 31

new_floats = LazyCompiled(lambda: L.make_zeros("float32", 8))
new_ints = LazyCompiled(lambda: L.make_zeros("int64", 8))
nearest_value = LazyCompiled(lambda: L.make_nearest_value(K.IQ4_VALUES))
nearest_index = LazyCompiled(lambda: L.make_nearest_index(K.IQ4_VALUES))


@exact
def fit_sums(x, w, per):
    """Return sum w q x and sum w q q of 32 weights x, importances w, and the table values q nearest to x times `per`."""
    first, second = L.get_floats(x), L.get_floats(x + 64)
    p, q = nearest_value(first * per), nearest_value(second * per)
    p_by, q_by = p * L.get_floats(w), q * L.get_floats(w + 64)
    return L.reduce_sum(p_by * first + q_by * second), L.reduce_sum(p_by * p + q_by * q)


@exact
def inverse(scale):
    """Return 1 / scale, or 0 for 0."""
    return float32(1.0) / scale if scale != 0 else float32(0.0)


@exact
def fit_scale(x, w):
    """Return the best real scale of 32 weights."""
    low, high = L.get_floats(x), L.get_floats(x + 64)
    least, largest = L.reduce_min(L.minimum(low, high)), L.reduce_max(L.maximum(low, high))
    per_peak = inverse(largest if largest > -least else least)
    best, best_scale = float32(0.0), float32(0.0)
    for guess in range(2 * GUESSES):
        end = float32(K.IQ4_VALUES[0] if guess < GUESSES else K.IQ4_VALUES[-1])
        per = (end + float32(SPACING) * (guess % GUESSES - GUESSES // 2)) * per_peak
        for _ in range(REFITS):
            qx, qq = fit_sums(x, w, per)
            if qx * qx > best * qq:  # the decrease of the squared error against zeros
                best, best_scale = float32(qx * qx / qq), float32(qx / qq)
            per = float32(qq / qx) if qx != 0 else per
    return best_scale


@exact
def store_codes(x, to, scale):
    """Store the codes of 32 weights."""
    per = inverse(scale)
    L.put_bytes(to, nearest_index(L.get_floats(x) * per) | nearest_index(L.get_floats(x + 64) * per) << 4)


@exact
def iq4_nl(x, w, to):
    """Encode a block as IQ4_NL."""
    d = round_step(fit_scale(x, w), True)
    L.put_half(to, d)
    store_codes(x, to + 2, d)


@exact
def choose_count(x, w, d, scale):
    """Return the best multiple of d for 32 weights: the decrease of the squared error, it, sum w q x, sum w q q."""
    best, best_count, best_qx, best_qq = float32(-np.inf), 0, float32(0.0), float32(0.0)
    wanted = scale * inverse(d)
    near = int(np.rint(max(min(wanted, float32(MAX_COUNT)), float32(MIN_COUNT))))
    for count in range(max(near - 1, MIN_COUNT), min(near + 1, MAX_COUNT) + 1):
        step = d * L.to_float(count)
        qx, qq = fit_sums(x, w, inverse(step))
        less = step * (qx + qx - step * qq)
        if less > best:
            best, best_count, best_qx, best_qq = less, count, qx, qq
    return best, best_count, best_qx, best_qq


@exact
def choose_counts(x, w, d, scales, counts):
    """Choose the multiples of all groups.

    Return the decrease of the squared error, and the step that fits the multiples best.
    """
    less = top = bottom = float32(0.0)
    for group in range(8):
        group_less, count, qx, qq = choose_count(x + 128 * group, w + 128 * group, d, scales[group])
        counts[group] = count
        less, top, bottom = (
            less + group_less,
            top + L.to_float(count) * qx,
            bottom + L.to_float(count) * L.to_float(count) * qq,
        )
    return less, round_step(top * inverse(bottom), True)


@exact
def search_step(x, w, scales, counts, best_counts):
    """Return the best step for 256 weights; `best_counts` gets the multiple of each group."""
    widest = float32(0.0)
    for group in range(8):
        scales[group] = fit_scale(x + 128 * group, w + 128 * group)
        widest = scales[group] if abs(scales[group]) > abs(widest) else widest
    best, best_d = float32(-np.inf), float32(0.0)
    for largest_count in LARGEST_COUNTS:
        d = round_step(widest / float32(largest_count), True)
        for _ in range(ROUNDS):
            less, following = choose_counts(x, w, d, scales, counts)
            if less > best:
                best, best_d = less, d
                for group in range(8):
                    best_counts[group] = counts[group]
            d = following
    return best_d


@exact
def iq4_xs(x, w, to, scales, counts, best):
    """Encode a block as IQ4_XS."""
    d, high = search_step(x, w, scales, counts, best), 0
    L.put_half(to, d)
    for group in range(8):
        high |= best[group] - MIN_COUNT >> 4 << 2 * group
        store_codes(x + 128 * group, to + (8 + 16 * group), d * L.to_float(best[group]))
    L.put_short(to + 2, high)
    for i in range(4):
        L.put_byte(to + (4 + i), best[2 * i] - MIN_COUNT & 15 | (best[2 * i + 1] - MIN_COUNT & 15) << 4)


@KernelEntry
def encode_iq4_rows(
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
):
    """Encode rows. A pitch is the distance between rows in bytes."""
    scales, counts, best = new_floats(), new_ints(), new_ints()
    for row in range(lo, hi):
        first, out = source + row * source_pitch, target + row * target_pitch
        by = importance + row * importance_pitch
        for i in range(elements // K.BLOCK[kind]):
            if kind == K.IQ4_NL:
                iq4_nl(first + 128 * i, by + 128 * i, out + K.SIZE[kind] * i)
            else:
                iq4_xs(first + 1024 * i, by + 1024 * i, out + K.SIZE[kind] * i, scales, counts, best)
