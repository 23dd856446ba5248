"""Tables of 64-bit keys that compiled loops look into: a place by a key, other keys beside it."""

from functools import cache
from typing import Any

import numpy as np
from numba import types

from llamatrain.machine.jit import compiler, inline

FREE = np.int64(-1)  # a place without a key
I64 = types.int64[::1]


@inline
def slot(keys, key):
    """Where a key is, or would be, in a table whose size is a power of two."""
    mask = len(keys) - 1
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    at = np.int64(mixed >> np.uint64(32)) & mask
    while keys[at] != key and keys[at] != FREE:
        at = (at + 1) & mask
    return at


def _fill(new_keys, new_values, keys, values):
    """Of a key that comes again the first value stays."""
    for i in range(len(new_keys)):
        at = slot(keys, new_keys[i])
        if keys[at] == FREE:
            keys[at] = new_keys[i]
            values[at] = new_values[i]


@cache
def function(body: Any, signature: Any) -> Any:
    """The body, compiled when it is first asked for, unless it was before."""
    return compiler.found_function(signature, body) or compiler.function(signature, body)


def table(keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keys, none of them negative, with their values, to be found by `slot`."""
    size = 1 << max(1, 2 * len(keys) - 1).bit_length()
    at, held = np.full(size, FREE), np.zeros(size, np.int64)
    fill = function(_fill, types.void(I64, I64, I64, I64))
    fill(np.ascontiguousarray(keys, np.int64), np.ascontiguousarray(values, np.int64), at, held)
    return at, held
