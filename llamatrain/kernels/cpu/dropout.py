"""Elements left out by a hash of their places: nothing is drawn in order, so that any part can be made again."""

import numpy as np

from llamatrain.kernels.cpu.binding import kernel
from llamatrain.kernels.cpu.vector import portion
from llamatrain.kernels.reference.dropout import mixed
from llamatrain.machine.jit import Entry, f32, i32, inline, real

FIRST, SECOND, STEP = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35), np.uint32(0x9E3779B9)
HALF, ODD = np.uint32(16), np.uint32(13)


@inline
def spread(z):  # type: ignore[no-untyped-def]
    z = (z ^ (z >> HALF)) * FIRST
    z = np.uint32(z)
    z = (z ^ (z >> ODD)) * SECOND
    z = np.uint32(z)
    return z ^ (z >> HALF)


@Entry
def leave_out(lo, hi, thread, a):  # type: ignore[no-untyped-def]
    x, key, out, first, limit, larger = f32(a[0]), i32(a[1]), f32(a[2]), np.uint32(a[3]), np.uint32(a[4]), np.float32(real(a[5]))
    start = spread(np.uint32(spread(np.uint32(first + np.uint32(key[0]))) + np.uint32(key[1])))
    for i in range(lo, hi):
        drawn = spread(np.uint32(np.uint32(np.uint32(i) * STEP) + start))
        out[i] = np.float32(0) if drawn < limit else x[i] * larger


@kernel("dropout")
def dropout(outs, ins, attrs, scratch, threads):  # type: ignore[no-untyped-def]
    rate, size = attrs["rate"], outs[0].size
    first = int(mixed(np.array([attrs["salt"]], np.uint32))[0])
    words = (first, int(rate * 2**32), 1 / (1 - rate))
    return [leave_out.call(ins[0], ins[1], outs[0], *words, items=size, block=portion(size))]
