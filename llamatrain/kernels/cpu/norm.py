"""Norms and their gradients.

RMS norm: y = x r w, r = 1 / sqrt(mean(x²) + eps). Layer norm: y = (x - m) r w + bias, m = mean(x), r = 1 /
sqrt(mean((x - m)²) + eps).
"""

import numpy as np

from llamatrain.compiler.declare import F32, KernelEntry, Real, exact, inline
from llamatrain.compiler.vectors import LANES, load_until, mask_range, reduce_sum, splat, sqrt, store_until
from llamatrain.kernels.cpu.chunking import choose_block, should_stream
from llamatrain.kernels.cpu.registry import kernel

ONE = np.float32(1)
MAX_CHUNKS = 64  # the most partial sums of dw


@inline
def dot(x, i, y, j, size):
    """Return the dot product of `size` elements, x from i on and y from j on."""
    a, b, c, d = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    x_end, y_end = i + size, j + size
    for _ in range(0, size, 4 * LANES):  # four sums, so that no addition waits for the previous one
        a += load_until(x, i, x_end) * load_until(y, j, y_end)
        b += load_until(x, i + LANES, x_end) * load_until(y, j + LANES, y_end)
        c += load_until(x, i + 2 * LANES, x_end) * load_until(y, j + 2 * LANES, y_end)
        d += load_until(x, i + 3 * LANES, x_end) * load_until(y, j + 3 * LANES, y_end)
        i, j = i + 4 * LANES, j + 4 * LANES
    return reduce_sum((a + b) + (c + d))


@exact
def reciprocal_root(x):
    """Return 1 / sqrt(x). An estimate would change a whole row by one factor, which recurrent blocks amplify."""
    return ONE / sqrt(x)


@inline
def reciprocal_rms(x, start, width, eps):
    """Return 1 / sqrt(mean(x²) + eps) of a row."""
    return reciprocal_root(dot(x, start, x, start, width) / np.float32(width) + np.float32(eps))


@KernelEntry
def norm_rows(lo, hi, thread, x: F32, w: F32, y: F32, width, eps: Real, stream):
    """Norm rows lo to hi."""
    for row in range(lo, hi):
        start, end = row * width, (row + 1) * width
        r = reciprocal_rms(x, start, width, eps)
        for i in range(0, width, LANES):
            store_until(
                y, start + i, end, load_until(x, start + i, end) * r * load_until(w, i, width), stream
            )


@kernel("rms_norm")
def rms_norm(outs, ins, attrs, scratch, threads):
    """Return the calls of `rms_norm`."""
    (y,), (x, w) = outs, ins
    width, rows = w.size, x.size // w.size
    block, stream = choose_block(rows, 4 * width), should_stream(y, x)
    return [norm_rows.call(x, w, y, width=width, eps=attrs["eps"], stream=stream, items=rows, block=block)]


# ---- gradients --------------------------------------------------------------
# n = x r, dx = r (dy w - n mean(dy w n)), dw = sum of dy n over rows: by chunks of rows first


@inline
def weighted_dot(dy, w, x, start, width):
    """Return the sum of dy w x over a row."""
    a, b, end = splat(0.0), splat(0.0), start + width
    for i in range(0, width, 2 * LANES):
        j, k = start + i, i + LANES
        a += load_until(dy, j, end) * load_until(w, i, width) * load_until(x, j, end)
        b += load_until(dy, j + LANES, end) * load_until(w, k, width) * load_until(x, j + LANES, end)
    return reduce_sum(a + b)


@KernelEntry
def norm_rows_back(
    lo, hi, thread, dy: F32, x: F32, w: F32, dx: F32, sums: F32, width, eps: Real, chunk, stream
):
    """Compute dx of rows lo to hi, a chunk, and the chunk's part of dw."""
    dw = lo // chunk * width
    for i in range(0, width, LANES):
        store_until(sums, dw + i, dw + width, splat(0.0), 0)
    for row in range(lo, hi):
        start, end = row * width, (row + 1) * width
        r = reciprocal_rms(x, start, width, eps)
        shared = r * r * weighted_dot(dy, w, x, start, width) / np.float32(width)
        for i in range(0, width, LANES):
            up, normal = load_until(dy, start + i, end), load_until(x, start + i, end) * r
            store_until(sums, dw + i, dw + width, load_until(sums, dw + i, dw + width) + up * normal, 0)
            store_until(
                dx, start + i, end, (up * load_until(w, i, width) - normal * (shared / r)) * r, stream
            )


@KernelEntry
def add_rows(lo, hi, thread, x: F32, y: F32, rows, width):
    """Sum columns lo to hi over `rows` rows."""
    for i in range(lo, hi, LANES):
        column = splat(0.0)
        for row in range(rows):
            column += load_until(x, row * width + i, row * width + hi)
        store_until(y, i, hi, column, 0)


def choose_chunk(rows: int) -> int:
    """Return the rows of a chunk, independent of the number of threads."""
    return max(16, -(-rows // MAX_CHUNKS))


def chunk_sum_bytes(outs, ins, attrs, threads):
    """Return the bytes of the chunks' sums."""
    rows = ins[1].size // ins[2].size if ins[2].size else 0
    return 4 * ins[2].size * -(-rows // choose_chunk(rows))


def back_calls(entry, outs, ins, attrs, scratch):
    """Return the calls of a norm's gradients: by chunks of rows, then the chunks' parts of dw are added."""
    (dx, dw), (dy, x, w) = outs, ins
    width, rows = w.size, x.size // w.size
    chunk, stream = choose_chunk(rows), should_stream(dx, dy, x)
    how = {"width": width, "eps": attrs["eps"], "chunk": chunk, "stream": stream}
    back = entry.call(dy, x, w, dx, scratch, **how, items=rows, block=chunk)
    chunks = -(-rows // chunk)
    return [
        back,
        add_rows.call(
            scratch, dw, rows=chunks, width=width, items=width, block=choose_block(width, chunks, LANES)
        ),
    ]


@kernel("rms_norm_back", scratch=chunk_sum_bytes)
def rms_norm_back(outs, ins, attrs, scratch, threads):
    """Return the calls of `rms_norm_back`."""
    return back_calls(norm_rows_back, outs, ins, attrs, scratch)


# ---- layer norm ---------------------------------------------------------------


@inline
def row_mean(x, start, width):
    """Return the mean of a row."""
    a, b, end = splat(0.0), splat(0.0), start + width
    for i in range(start, end, 2 * LANES):
        a += load_until(x, i, end)
        b += load_until(x, i + LANES, end)
    return reduce_sum(a + b) / np.float32(width)


@inline
def load_centered(x, i, start, end, mean):
    """Load x - mean; lanes behind the end are 0."""
    return mask_range(load_until(x, i, end) - mean, i, start, end, np.float32(0))


@inline
def reciprocal_deviation(x, start, width, mean, eps):
    """Return 1 / sqrt(mean((x - mean)²) + eps) of a row."""
    a, b, end = splat(0.0), splat(0.0), start + width
    for i in range(start, end, 2 * LANES):
        first, second = load_centered(x, i, start, end, mean), load_centered(x, i + LANES, start, end, mean)
        a += first * first
        b += second * second
    return reciprocal_root(reduce_sum(a + b) / np.float32(width) + np.float32(eps))


@KernelEntry
def layer_norm_rows(lo, hi, thread, x: F32, w: F32, bias: F32, y: F32, width, has_bias, eps: Real, stream):
    """Norm rows lo to hi. Without a bias, the weight stands in its place and is not used."""
    for row in range(lo, hi):
        start, end = row * width, (row + 1) * width
        mean = row_mean(x, start, width)
        r = reciprocal_deviation(x, start, width, mean, eps)
        for i in range(0, width, LANES):
            made = (load_until(x, start + i, end) - mean) * r * load_until(w, i, width)
            if has_bias:
                made += load_until(bias, i, width)
            store_until(y, start + i, end, made, stream)


@kernel("layer_norm")
def layer_norm(outs, ins, attrs, scratch, threads):
    """Return the calls of `layer_norm`."""
    (y,), (x, w, *bias) = outs, ins
    width, rows = w.size, x.size // w.size
    how = {"width": width, "has_bias": bool(bias), "eps": attrs["eps"], "stream": should_stream(y, x)}
    block = choose_block(rows, 4 * width)
    return [layer_norm_rows.call(x, w, *(bias or [w]), y, **how, items=rows, block=block)]


@inline
def weighted_sums(dy, w, x, start, width, mean):
    """Return the sums of dy w and of dy w (x - mean) over a row."""
    a, b, end = splat(0.0), splat(0.0), start + width
    for i in range(0, width, LANES):
        up = load_until(dy, start + i, end) * load_until(w, i, width)
        a += up
        b += up * (load_until(x, start + i, end) - mean)
    return reduce_sum(a), reduce_sum(b)


@KernelEntry
def layer_norm_rows_back(
    lo, hi, thread, dy: F32, x: F32, w: F32, dx: F32, sums: F32, width, eps: Real, chunk, stream
):
    """Compute dx of rows lo to hi, a chunk, and the chunk's part of dw."""
    dw = lo // chunk * width
    for i in range(0, width, LANES):
        store_until(sums, dw + i, dw + width, splat(0.0), 0)
    for row in range(lo, hi):
        start, end = row * width, (row + 1) * width
        mean = row_mean(x, start, width)
        r = reciprocal_deviation(x, start, width, mean, eps)
        total, along = weighted_sums(dy, w, x, start, width, mean)
        middle, shared = total / np.float32(width), r * along / np.float32(width)
        for i in range(0, width, LANES):
            up, normal = load_until(dy, start + i, end), load_centered(x, start + i, start, end, mean) * r
            store_until(sums, dw + i, dw + width, load_until(sums, dw + i, dw + width) + up * normal, 0)
            store_until(
                dx, start + i, end, (up * load_until(w, i, width) - middle - normal * shared) * r, stream
            )


@kernel("layer_norm_back", scratch=chunk_sum_bytes)
def layer_norm_back(outs, ins, attrs, scratch, threads):
    """Return the calls of `layer_norm_back`."""
    return back_calls(layer_norm_rows_back, outs, ins, attrs, scratch)
