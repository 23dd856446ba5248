"""Causal convolution of few taps: each token is a sum of itself and its predecessors, channel by channel.

The taps are transposed first, so that the lanes of a vector are channels.
"""

import numpy as np

from llamatrain.compiler.declare import F32, I32, KernelEntry, inline
from llamatrain.compiler.vectors import LANES, load_until, splat, store_until
from llamatrain.kernels.cpu.chunking import choose_block
from llamatrain.kernels.cpu.norm import add_rows, choose_chunk
from llamatrain.kernels.cpu.registry import kernel

ZERO = np.float32(0)


@KernelEntry
def transpose(lo, hi, thread, x: F32, y: F32, rows, columns):
    """Transpose rows lo to hi of x (rows, columns)."""
    for i in range(lo, hi):
        for j in range(columns):
            y[j * rows + i] = x[i * columns + j]


@inline
def visible_taps(starts, token, t, taps):
    """Return how many taps of a token are in its sample: token t of its row."""
    return min(taps, t - max(0, starts[token]) + 1)


@KernelEntry
def conv_rows(lo, hi, thread, x: F32, taps_by_channel: F32, starts: I32, y: F32, length, width, taps):
    """Convolve tokens lo to hi."""
    for token in range(lo, hi):
        visible, start, end = (
            visible_taps(starts, token, token % length, taps),
            token * width,
            (token + 1) * width,
        )
        for i in range(0, width, LANES):
            total = splat(ZERO)
            for back in range(visible):
                tap = (taps - 1 - back) * width
                total += load_until(x, start - back * width + i, end - back * width) * load_until(
                    taps_by_channel, tap + i, tap + width
                )
            store_until(y, start + i, end, total, 0)


@KernelEntry
def conv_rows_back(lo, hi, thread, dy: F32, taps_by_channel: F32, starts: I32, dx: F32, length, width, taps):
    """Compute the gradients of tokens lo to hi: each token is a part of its successors."""
    for token in range(lo, hi):
        start, end, t = token * width, (token + 1) * width, token % length
        ahead = min(taps, length - t)
        for i in range(0, width, LANES):
            total = splat(ZERO)
            for later in range(ahead):
                if starts[token + later] <= t:
                    tap, offset = (taps - 1 - later) * width, later * width
                    total += load_until(dy, start + offset + i, end + offset) * load_until(
                        taps_by_channel, tap + i, tap + width
                    )
            store_until(dx, start + i, end, total, 0)


@KernelEntry
def conv_taps_back(lo, hi, thread, dy: F32, x: F32, starts: I32, sums: F32, length, width, taps, chunk):
    """Compute a chunk's part of the gradient of the taps, from tokens lo to hi: (taps, channels)."""
    first = lo // chunk * taps * width
    for i in range(first, first + taps * width, LANES):
        store_until(sums, i, first + taps * width, splat(ZERO), 0)
    for token in range(lo, hi):
        start, end = token * width, (token + 1) * width
        for back in range(visible_taps(starts, token, token % length, taps)):
            at, offset = first + (taps - 1 - back) * width, back * width
            for i in range(0, width, LANES):
                part = load_until(dy, start + i, end) * load_until(x, start - offset + i, end - offset)
                store_until(sums, at + i, at + width, load_until(sums, at + i, at + width) + part, 0)


def taps_bytes(outs, ins, attrs, threads):
    """Return the bytes of the transposed taps."""
    return 4 * ins[1].size


def convolve(entry, outs, ins, scratch):
    """Return the calls that transpose the taps and compute all tokens."""
    (out,), (x, w, starts) = outs, ins
    width, taps = w.shape
    sizes = {"length": x.shape[1], "width": width, "taps": taps}
    turned = transpose.call(
        w, scratch, rows=width, columns=taps, items=width, block=choose_block(width, taps)
    )
    rows = entry.call(
        x, scratch, starts, out, **sizes, items=starts.size, block=choose_block(starts.size, 2 * taps * width)
    )
    return [turned, rows]


@kernel("causal_conv", scratch=taps_bytes)
def causal_conv(outs, ins, attrs, scratch, threads):
    """Return the calls of `causal_conv`."""
    return convolve(conv_rows, outs, ins, scratch)


@kernel("causal_conv_back", scratch=taps_bytes)
def causal_conv_back(outs, ins, attrs, scratch, threads):
    """Return the calls of `causal_conv_back`."""
    return convolve(conv_rows_back, outs, ins, scratch)


def chunk_sum_bytes(outs, ins, attrs, threads):
    """Return the bytes of the chunks' sums, and of the sum of all."""
    tokens = ins[2].size
    return 4 * outs[0].size * (-(-tokens // choose_chunk(tokens)) + 1)


@kernel("causal_conv_weight_back", scratch=chunk_sum_bytes)
def causal_conv_weight_back(outs, ins, attrs, scratch, threads):
    """Return the calls of `causal_conv_weight_back`."""
    (dw,), (dy, x, starts) = outs, ins
    (width, taps), tokens = dw.shape, starts.size
    chunk = choose_chunk(tokens)
    chunks = -(-tokens // chunk)
    sums = scratch[4 * dw.size :]
    sizes = {"length": x.shape[1], "width": width, "taps": taps, "chunk": chunk}
    return [
        conv_taps_back.call(dy, x, starts, sums, **sizes, items=tokens, block=chunk),
        add_rows.call(
            sums,
            scratch,
            rows=chunks,
            width=dw.size,
            items=dw.size,
            block=choose_block(dw.size, chunks, LANES),
        ),
        transpose.call(scratch, dw, rows=taps, columns=width, items=taps, block=taps),
    ]


@KernelEntry
def keep_last_rows(lo, hi, thread, state: F32, x: F32, out: F32, rows, tokens, width):
    """Store the last rows of each state and its x in `out`, which may be the state: vectors lo to hi of columns."""
    vectors = (width + LANES - 1) // LANES
    for item in range(lo, hi):
        text, i = item // vectors, item % vectors * LANES
        for row in range(rows):
            source, to = row + tokens, (text * rows + row) * width
            if source < rows:
                start = (text * rows + source) * width
                v = load_until(state, start + i, start + width)
            else:
                start = (text * tokens + source - rows) * width
                v = load_until(x, start + i, start + width)
            store_until(out, to + i, to + width, v, 0)


@KernelEntry
def conv_from_state(lo, hi, thread, state: F32, x: F32, w: F32, y: F32, tokens, width, taps):
    """Convolve channels lo to hi of all texts."""
    for item in range(lo, hi):
        text, channel = item // width, item % width
        first, before = text * tokens, text * (taps - 1)  # the rows of a text in x, and in state
        for t in range(tokens):
            total = ZERO
            for tap in range(taps):
                row = t + tap - (taps - 1)
                if row >= 0:
                    value = x[(first + row) * width + channel]
                else:
                    value = state[(before + row + taps - 1) * width + channel]
                total += value * w[channel * taps + tap]
            y[(first + t) * width + channel] = total


@kernel("causal_conv_step")
def causal_conv_step(outs, ins, attrs, scratch, threads):
    """Return the calls of `causal_conv_step`."""
    (state_out, y), (state, x, w) = outs, ins
    (width, taps), (texts, tokens, _) = w.shape, x.shape
    sizes = {"tokens": tokens, "width": width}
    channels, vectors = texts * width, texts * -(-width // LANES)
    calls = [
        conv_from_state.call(
            state,
            x,
            w,
            y,
            **sizes,
            taps=taps,
            items=channels,
            block=choose_block(channels, 2 * taps * tokens),
        )
    ]
    if taps > 1:
        block = choose_block(vectors, taps * LANES)
        calls.append(
            keep_last_rows.call(state, x, state_out, rows=taps - 1, **sizes, items=vectors, block=block)
        )
    return calls
