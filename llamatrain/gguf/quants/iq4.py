"""Finite float32 to IQ4_NL and IQ4_XS: codes stand for 16 numbers that lie closer about zero, times a scale for 32 weights.

A scale is found as for K-quants (kquants.py): guesses from the weight of largest size, each improved by turns: the nearest
numbers, then the scale that fits those best (least squares). IQ4_XS counts the scales of 8 groups in steps d: from the largest
scale, some guesses; for each every group takes the count near its real one that serves it best, and d is fitted to the counts.
"""

import numpy as np
from numpy import float32

from llamatrain.compiler.declare import U8, KernelEntry, LazyCompiled, exact
from llamatrain.compiler.vectors import sixteen as L
from llamatrain.gguf.quants import kinds as K
from llamatrain.gguf.quants.kquants import half_step

GUESSES, SPACING, TURNS, ROUNDS = 12, 3.0, 2, 2
STEPS = (-32, -31, 31)  # what the largest scale of 8 may count as
LEAST, MOST = -32, 31

reals, counts = LazyCompiled(lambda: L.room("float32", 8)), LazyCompiled(lambda: L.room("int64", 8))
nearest, place = LazyCompiled(lambda: L.nearest_of(K.VALUES)), LazyCompiled(lambda: L.place_of(K.VALUES))


@exact
def sums(x, per):
    """Of 32 weights x and the numbers q nearest to x times `per`: sum q x, sum q q."""
    first, second = L.get_floats(x), L.get_floats(x + 64)
    p, q = nearest(first * per), nearest(second * per)
    return L.total(p * first + q * second), L.total(p * p + q * q)


@exact
def inverse(scale):
    return float32(1.0) / scale if scale != 0 else float32(0.0)


@exact
def fit(x):
    """The best real scale of 32 weights."""
    low, high = L.get_floats(x), L.get_floats(x + 64)
    least, largest = L.least(L.smaller(low, high)), L.largest(L.larger(low, high))
    per_peak = inverse(largest if largest > -least else least)
    best, best_scale = float32(0.0), float32(0.0)
    for guess in range(2 * GUESSES):
        end = float32(K.VALUES[0] if guess < GUESSES else K.VALUES[-1])
        per = (end + float32(SPACING) * (guess % GUESSES - GUESSES // 2)) * per_peak
        for _ in range(TURNS):
            qx, qq = sums(x, per)
            if qx * qx > best * qq:  # by which the squared error is less than that of zeros
                best, best_scale = float32(qx * qx / qq), float32(qx / qq)
            per = float32(qq / qx) if qx != 0 else per
    return best_scale


@exact
def put_codes(x, to, scale):
    per = inverse(scale)
    L.put_bytes(to, place(L.get_floats(x) * per) | place(L.get_floats(x + 64) * per) << 4)


@exact
def iq4_nl(x, to):
    d = half_step(fit(x), True)
    L.put_half(to, d)
    put_codes(x, to + 2, d)


@exact
def take(x, d, scale):
    """The count of steps d that serves 32 weights best: by how much the squared error is less, it, sum q x, sum q q."""
    best, best_count, best_qx, best_qq = float32(-np.inf), 0, float32(0.0), float32(0.0)
    wanted = scale * inverse(d)
    near = int(np.rint(max(min(wanted, float32(MOST)), float32(LEAST))))
    for count in range(max(near - 1, LEAST), min(near + 1, MOST) + 1):
        step = d * L.real(count)
        qx, qq = sums(x, inverse(step))
        less = step * (qx + qx - step * qq)
        if less > best:
            best, best_count, best_qx, best_qq = less, count, qx, qq
    return best, best_count, best_qx, best_qq


@exact
def take_all(x, d, real, taken):
    """Counts for all groups: by how much the squared error is less, and the step that would suit them best."""
    less = top = bottom = float32(0.0)
    for group in range(8):
        some, count, qx, qq = take(x + 128 * group, d, real[group])
        taken[group] = count
        less, top, bottom = less + some, top + L.real(count) * qx, bottom + L.real(count) * L.real(count) * qq
    return less, half_step(top * inverse(bottom), True)


@exact
def search(x, real, taken, best_taken):
    """The best step for 256 weights, and into `best_taken` each group's count."""
    widest = float32(0.0)
    for group in range(8):
        real[group] = fit(x + 128 * group)
        widest = real[group] if abs(real[group]) > abs(widest) else widest
    best, best_d = float32(-np.inf), float32(0.0)
    for most in STEPS:
        d = half_step(widest / float32(most), True)
        for _ in range(ROUNDS):
            less, following = take_all(x, d, real, taken)
            if less > best:
                best, best_d = less, d
                for group in range(8):
                    best_taken[group] = taken[group]
            d = following
    return best_d


@exact
def iq4_xs(x, to, real, taken, best):
    d, high = search(x, real, taken, best), 0
    L.put_half(to, d)
    for group in range(8):
        high |= best[group] - LEAST >> 4 << 2 * group
        put_codes(x + 128 * group, to + (8 + 16 * group), d * L.real(best[group]))
    L.put_short(to + 2, high)
    for i in range(4):
        L.put_byte(to + (4 + i), best[2 * i] - LEAST & 15 | (best[2 * i + 1] - LEAST & 15) << 4)


@KernelEntry
def encode_iq4_rows(lo, hi, thread, kind, source: U8, source_pitch, target: U8, target_pitch, elements):
    real, taken, best = reals(), counts(), counts()
    for row in range(lo, hi):
        first, made = source + row * source_pitch, target + row * target_pitch
        for i in range(elements // K.BLOCK[kind]):
            if kind == K.IQ4_NL:
                iq4_nl(first + 128 * i, made + K.SIZE[kind] * i)
            else:
                iq4_xs(first + 1024 * i, made + K.SIZE[kind] * i, real, taken, best)
