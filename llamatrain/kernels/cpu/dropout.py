"""Dropout by a hash of positions: nothing is drawn in order, so any part can be recomputed."""

import numpy as np

from llamatrain.compiler.declare import F32, I32, KernelEntry, Real, i32, inline
from llamatrain.kernels.cpu.chunking import choose_block
from llamatrain.kernels.cpu.registry import kernel
from llamatrain.kernels.reference.dropout import mix_bits

FIRST, SECOND, STEP = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35), np.uint32(0x9E3779B9)
HALF, ODD = np.uint32(16), np.uint32(13)


@inline
def mix_uint32(z):
    """Mix the bits of a 32-bit number (the finalizer of MurmurHash3)."""
    z = (z ^ (z >> HALF)) * FIRST
    z = np.uint32(z)
    z = (z ^ (z >> ODD)) * SECOND
    z = np.uint32(z)
    return z ^ (z >> HALF)


@KernelEntry
def drop_elements(
    lo, hi, thread, x: F32, key: I32, out: F32, tokens, size, length, salt, limit, factor: Real
):
    """Set dropped elements of tokens lo to hi to zero and scale the others."""
    larger = np.float32(factor)
    seed = mix_uint32(np.uint32(np.uint32(salt) + np.uint32(key[0])))
    for number in range(lo, hi):
        token = number if tokens == 0 else i32(tokens)[number]
        row = np.uint32(np.uint32(key[1]) + np.uint32(token // length))
        start = mix_uint32(np.uint32(seed + row))
        first = np.uint32(np.uint32(token % length) * np.uint32(size))
        line = number * size
        for i in range(size):
            drawn = mix_uint32(np.uint32(np.uint32(np.uint32(first + np.uint32(i)) * STEP) + start))
            out[line + i] = np.float32(0) if drawn < np.uint32(limit) else x[line + i] * larger


@kernel("dropout")
def dropout(outs, ins, attrs, scratch, threads):
    """Return the calls of `dropout`."""
    (x, key, *tokens), (out,), rate = ins, outs, attrs["rate"]
    count, size = len(x), x.size // max(1, len(x))
    salt = int(mix_bits(np.array([attrs["salt"]], np.uint32))[0])
    how = {
        "salt": salt,
        "limit": int(rate * 2**32),
        "factor": 1 / (1 - rate),
        "length": attrs["length"],
        "size": size,
    }
    token_ids = tokens[0] if tokens else 0
    return [
        drop_elements.call(x, key, out, token_ids, **how, items=count, block=choose_block(count, 4 * size))
    ]
