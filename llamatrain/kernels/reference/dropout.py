"""Reference kernels of `graph/ops/dropout.py`, in the same order."""

import numpy as np

from llamatrain.kernels.reference.registry import kernel


def mix_bits(z):
    """Mix the bits of 32-bit numbers (the finalizer of MurmurHash3)."""
    z = (z ^ (z >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    z = (z ^ (z >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return z ^ (z >> np.uint32(16))


@kernel
def dropout(x, key, tokens=None, *, rate, salt, length):
    """Return x with a share of its elements set to zero and the others scaled up."""
    seeds = np.array([salt, *key.view(np.uint32)], np.uint32)
    count, size = len(x), x.size // max(1, len(x))
    tokens = np.arange(count, dtype=np.uint32) if tokens is None else tokens.view(np.uint32)
    rows, at = np.divmod(tokens, np.uint32(length))
    starts = mix_bits(mix_bits(mix_bits(seeds[:1]) + seeds[1:2]) + seeds[2:3] + rows)
    places = at[:, None] * np.uint32(size) + np.arange(size, dtype=np.uint32)
    drawn = mix_bits(places * np.uint32(0x9E3779B9) + starts[:, None]).reshape(x.shape)
    return np.where(drawn < np.uint32(rate * 2**32), 0, x * x.dtype.type(1 / (1 - rate)))
