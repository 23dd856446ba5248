"""Elements left out by a hash of their places: nothing is drawn in order, so that any part can be made again."""

import numpy as np

from llamatrain.kernels.cpu.binding import kernel
from llamatrain.kernels.cpu.portions import portion
from llamatrain.kernels.reference.dropout import mixed
from llamatrain.machine.entry import F32, I32, Entry, Real, inline

FIRST, SECOND, STEP = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35), np.uint32(0x9E3779B9)
HALF, ODD = np.uint32(16), np.uint32(13)


@inline
def spread(z):
    z = (z ^ (z >> HALF)) * FIRST
    z = np.uint32(z)
    z = (z ^ (z >> ODD)) * SECOND
    z = np.uint32(z)
    return z ^ (z >> HALF)


@Entry
def leave_out(lo, hi, thread, x: F32, key: I32, out: F32, salt, limit, factor: Real):
    larger = np.float32(factor)
    start = spread(np.uint32(spread(np.uint32(np.uint32(salt) + np.uint32(key[0]))) + np.uint32(key[1])))
    for i in range(lo, hi):
        drawn = spread(np.uint32(np.uint32(np.uint32(i) * STEP) + start))
        out[i] = np.float32(0) if drawn < np.uint32(limit) else x[i] * larger


@kernel("dropout")
def dropout(outs, ins, attrs, scratch, threads):
    rate, size = attrs["rate"], outs[0].size
    salt = int(mixed(np.array([attrs["salt"]], np.uint32))[0])
    how = {"salt": salt, "limit": int(rate * 2**32), "factor": 1 / (1 - rate)}
    return [leave_out.call(ins[0], ins[1], outs[0], **how, items=size, block=portion(size))]
