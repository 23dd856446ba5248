"""Encoding of finite float32 to K-quants: 256 weights with quantized scales and mins, chosen for the least squared error.

First, real scales: for each group of 16 or 32 weights, a few guesses from its range, each improved in turns:
codes for a scale and offset, then the scale and offset that fit those codes best (least squares). Then the
two steps d and dmin that the scales and offsets are multiples of: several guesses from the largest ones; for
each, every group takes the whole numbers near its real ones with the least true error, and d and dmin are
fitted to these. The best of all is written.

A code q of a group stands for d * scale * q - dmin * offset. `w` has the importance of each weight: what its squared
error is multiplied with.
"""

import numpy as np
from numpy import float32, float64

from llamatrain.compiler.declare import U8, KernelEntry, LazyCompiled, exact
from llamatrain.compiler.vectors import vec16 as L
from llamatrain.gguf.quants import kinds as K
from llamatrain.gguf.quants.kblocks import round_codes, write_block

LARGEST_HALF = 65504.0
GUESSES, SPACING, REFITS, STEPS, ROUNDS = 12, 0.2, 2, 2, 2

# by type: vectors of 16 in a group, lowest and highest code, highest scale
SHAPES = {
    K.Q2_K: (1, 0, 3, 15),
    K.Q3_K: (1, -4, 3, 31),
    K.Q4_K: (2, 0, 15, 63),
    K.Q5_K: (2, 0, 31, 63),
    K.Q6_K: (1, -32, 31, 127),
}

new_floats = LazyCompiled(lambda: L.make_zeros("float32", 2, 16))
new_ints = LazyCompiled(lambda: L.make_zeros("int64", 2, 16))


@exact
def squared_error(x, w, vectors, scale, offset, low, top):
    """Return the sum of squared errors of a group, times importances."""
    squares = L.splat(float32(0.0))
    for v in range(vectors):
        error = round_codes(x + 64 * v, scale, offset, low, top) * scale - offset - L.get_floats(x + 64 * v)
        squares += error * error * L.get_floats(w + 64 * v)
    return L.reduce_sum(squares)


@exact
def code_sums(x, w, vectors, scale, offset, low, top):
    """Return sum w, sum w q, sum w q q, sum w q x and sum w x of a group's codes q, weights x and importances w.

    The first is a float64, because differences of products with it lose digits.
    """
    w1 = q1 = q2 = qx = x1 = L.splat(float32(0.0))
    for v in range(vectors):
        q, value = round_codes(x + 64 * v, scale, offset, low, top), L.get_floats(x + 64 * v)
        by = L.get_floats(w + 64 * v)
        q_by = q * by
        w1, q1, q2, qx, x1 = w1 + by, q1 + q_by, q2 + q * q_by, qx + q_by * value, x1 + value * by
    return float64(L.reduce_sum(w1)), L.reduce_sum(q1), L.reduce_sum(q2), L.reduce_sum(qx), L.reduce_sum(x1)


@exact
def refit(x, w, vectors, scale, offset, low, top):
    """Return the scale and offset that fit the codes of the given ones best.

    Offsets are never negative, or always 0.
    """
    count, q1, q2, qx, x1 = code_sums(x, w, vectors, scale, offset, low, top)
    if low == 0:
        spread = count * q2 - q1 * q1
        if not spread > 0:
            return scale, max(float32((scale * q1 - x1) / count), float32(0.0))
        shift = (q1 * qx - q2 * x1) / spread
        if shift > 0:
            return float32((count * qx - q1 * x1) / spread), float32(shift)
    return float32(qx / q2) if q2 > 0 else scale, float32(0.0)


@exact
def min_and_max(x, vectors):
    """Return the smallest and the largest weight of a group."""
    least = largest = L.get_floats(x)
    for v in range(1, vectors):
        least, largest = (
            L.minimum(L.get_floats(x + 64 * v), least),
            L.maximum(L.get_floats(x + 64 * v), largest),
        )
    return L.reduce_min(least), L.reduce_max(largest)


@exact
def fit_group(x, w, vectors, low, top):
    """Return a group's best real scale and offset."""
    least, largest = min_and_max(x, vectors)
    if low == 0:
        offset = max(-least, float32(0.0))
        reach = min(least, float32(0.0)) - max(largest, float32(0.0))
        signs = 1
        levels = top
    else:  # the value with the largest absolute value may get the lowest code, since there is one more below 0
        offset, reach, signs, levels = float32(0.0), largest if largest > -least else least, 2, -low
    best, best_scale, best_offset = float32(np.inf), float32(0.0), offset
    for guess in range(GUESSES):
        size = reach / (
            levels + float32(SPACING) * ((guess + GUESSES // 2 - 1) % GUESSES - (GUESSES // 2 - 1))
        )
        for sign in range(signs):
            scale, shift = size if sign else -size, offset
            for _ in range(REFITS):
                scale, shift = refit(x, w, vectors, scale, shift, low, top)
            error = squared_error(x, w, vectors, scale, shift, low, top)
            if error < best:
                best, best_scale, best_offset = error, scale, shift
    return best_scale, best_offset


@exact
def choose_counts(x, w, vectors, d, dmin, scale, offset, low, top, max_count):
    """Return a group's best multiples of d and dmin: squared error, scale, offset."""
    best, best_count, best_shift = float32(np.inf), 0, 0
    near = int(min(np.rint(abs(scale / d)), float32(max_count))) if d != 0 else 0
    least = -max_count - 1 if low < 0 else 0
    for sign in range(-1 if low < 0 else 1, 2, 2):
        for count in range(max(sign * near - 1, least), min(sign * near + 1, max_count) + 1):
            step = d * L.to_float(count)
            first, last = 0, 0
            if dmin > 0:
                w1, q1, _, _, x1 = code_sums(x, w, vectors, step, offset, low, top)
                wanted = (step * q1 - x1) / w1 / dmin
                first = int(max(min(np.rint(wanted), float32(max_count)), float32(0.0)))
                first, last = max(first - 1, 0), min(first + 1, max_count)
            for shift in range(first, last + 1):
                error = squared_error(x, w, vectors, step, dmin * L.to_float(shift), low, top)
                if error < best:
                    best, best_count, best_shift = error, count, shift
    return best, best_count, best_shift


@exact
def round_step(value, signed):
    """Round a step to half precision; 0 if there is none."""
    if value != value or (value < 0 and not signed):
        return float32(0.0)
    return L.round_to_half(max(min(float32(value), float32(LARGEST_HALF)), float32(-LARGEST_HALF)))


@exact
def choose_all_counts(x, w, vectors, d, dmin, real, low, top, max_count, counts):
    """Choose the multiples of all groups; return the squared error and the steps that fit them best."""
    error = aa = ab = bb = ax = bx = float32(0.0)
    for group in range(16 // vectors):
        at, by = x + 64 * vectors * group, w + 64 * vectors * group
        group_error, count, shift = choose_counts(
            at, by, vectors, d, dmin, real[0, group], real[1, group], low, top, max_count
        )
        counts[0, group], counts[1, group] = count, shift
        a, b = L.to_float(count), L.to_float(shift)
        w1, q1, q2, qx, x1 = code_sums(at, by, vectors, d * a, dmin * b, low, top)
        error += group_error
        aa, ab, bb = aa + a * a * q2, ab + a * b * q1, bb + b * b * w1
        ax, bx = ax + a * qx, bx + b * x1
    spread = aa * bb - ab * ab
    if spread > 0:
        return (
            error,
            round_step((bb * ax - ab * bx) / spread, False),
            round_step((ab * ax - aa * bx) / spread, False),
        )
    return error, round_step(ax / aa if aa > 0 else float32(0.0), low < 0), dmin


@exact
def copy_counts(counts, to, groups):
    """Copy the multiples of all groups."""
    for group in range(groups):
        to[0, group], to[1, group] = counts[0, group], counts[1, group]


@exact
def search_steps(x, w, vectors, low, top, max_count, real, counts, best_counts):
    """Return the best d and dmin for 256 weights; `best_counts` gets each group's scale and offset."""
    widest = deepest = float32(0.0)
    for group in range(16 // vectors):
        at = 64 * vectors * group
        real[0, group], real[1, group] = fit_group(x + at, w + at, vectors, low, top)
        widest = real[0, group] if abs(real[0, group]) > abs(widest) else widest
        deepest = max(deepest, real[1, group])
    best, best_d, best_dmin = float32(np.inf), float32(0.0), float32(0.0)
    for group in range(16 // vectors):
        best_counts[0, group] = best_counts[1, group] = 0
    for guess in range(STEPS):
        scales = (
            max_count - guess if low == 0 else guess - max_count - 1
        )  # a signed scale reaches one further down
        d, dmin = round_step(widest / scales, low < 0), round_step(deepest / abs(scales), False)
        for _ in range(ROUNDS):
            error, next_d, next_dmin = choose_all_counts(
                x, w, vectors, d, dmin, real, low, top, max_count, counts
            )
            if error < best:
                best, best_d, best_dmin = error, d, dmin
                copy_counts(counts, best_counts, 16 // vectors)
            d, dmin = next_d, next_dmin
    return best_d, best_dmin


@KernelEntry
def encode_k_rows(
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
    vectors,
    low,
    top,
    max_count,
):
    """Encode rows. A pitch is the distance between rows in bytes."""
    real, counts, best = new_floats(), new_ints(), new_ints()
    for row in range(lo, hi):
        for i in range(elements // 256):
            x, to = source + (row * source_pitch + 1024 * i), target + (row * target_pitch + K.SIZE[kind] * i)
            w = importance + (row * importance_pitch + 1024 * i)
            d, dmin = search_steps(x, w, vectors, low, top, max_count, real, counts, best)
            write_block(kind, x, to, d, dmin, best)
