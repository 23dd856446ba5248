"""Tables of 64-bit keys that compiled loops look into: a place by a key, other keys beside it."""

from typing import NamedTuple

import numpy as np

from llamatrain.compiler.declare import Function, I64s, U8s, inline

FREE = np.int64(-1)  # a place without a key


class Symbols(NamedTuple):
    bytes: I64s  # the symbol, or in `llama` vocabularies the token, of each byte
    keys: I64s  # pairs: left above, right below
    values: I64s  # rank above, what the pair becomes below
    spelt: I64s  # where in `spelling` the tokens of each symbol begin, and end
    spelling: I64s


class Characters(NamedTuple):
    """The table of symbols that are characters."""

    keys: I64s
    symbols: I64s


class WholeWords(NamedTuple):
    """Tokens by their bytes, as a table of `word_key`; of no words all is empty."""

    keys: I64s
    tokens: I64s
    text: U8s  # of all tokens
    ends: I64s  # of each in it


@inline
def slot(keys, key):
    """Where a key is, or would be, in a table whose size is a power of two."""
    mask = len(keys) - 1
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    at = np.int64(mixed >> np.uint64(32)) & mask
    while keys[at] != key and keys[at] != FREE:
        at = (at + 1) & mask
    return at


@Function
def fill(new_keys: I64s, new_values: I64s, keys: I64s, values: I64s) -> None:
    """Of a key that comes again the first value stays."""
    for i in range(len(new_keys)):
        at = slot(keys, new_keys[i])
        if keys[at] == FREE:
            keys[at] = new_keys[i]
            values[at] = new_values[i]


def table(keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keys, none of them negative, with their values, to be found by `slot`."""
    size = 1 << max(1, 2 * len(keys) - 1).bit_length()
    at, held = np.full(size, FREE), np.zeros(size, np.int64)
    fill(np.ascontiguousarray(keys, np.int64), np.ascontiguousarray(values, np.int64), at, held)
    return at, held
