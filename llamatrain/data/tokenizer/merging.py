"""Byte pair encoding, compiled.

Merging takes symbols (numbered texts) and a table of pairs: which two symbols that stand side by side may become which
third, and in which order: the pair of the lowest rank first, of equals the leftmost. Short rows are scanned for the
lowest, long ones keep a heap.
"""

from typing import Any

import numpy as np
from numba import types

from llamatrain.data.tokenizer.tables import FREE, I64, function, slot
from llamatrain.machine.jit import inline

NEVER = np.int64(0x7FFFFFFF)  # the rank of two that stand side by side in a token and do not merge
SCANNED = 40  # symbols in a row that is scanned; beyond, a heap is faster
U8, I32 = types.uint8[::1], types.int32[::1]
TEXT = types.Array(types.uint8, 1, "C", readonly=True)


@inline
def _pair(keys, values, left, right):
    """The rank of a pair above, what it becomes below; NEVER and nothing where there is none."""
    at = slot(keys, left << 32 | right)
    return values[at] if keys[at] != FREE else NEVER << 32


@inline
def _merge_scanned(symbols, ranks, count, keys, values):
    """Merge a row in place, its first `count - 1` ranks given as pairs; how many symbols are left."""
    while count > 1:
        best, at = NEVER << 32, -1
        for i in range(count - 1):
            if ranks[i] >> 32 < best >> 32:
                best, at = ranks[i], i
        if at < 0:
            return count
        symbols[at] = best & 0xFFFFFFFF
        for i in range(at + 1, count - 1):
            symbols[i] = symbols[i + 1]
            ranks[i] = ranks[i + 1]
        count -= 1
        if at:
            ranks[at - 1] = _pair(keys, values, symbols[at - 1], symbols[at])
        if at < count - 1:
            ranks[at] = _pair(keys, values, symbols[at], symbols[at + 1])
    return count


@inline
def _push(heap, size, entry):
    at = size
    while at and heap[(at - 1) >> 1] > entry:
        heap[at] = heap[(at - 1) >> 1]
        at = (at - 1) >> 1
    heap[at] = entry
    return size + 1


@inline
def _pop(heap, size):
    """The lowest goes; the last finds its place from the top."""
    size -= 1
    entry, at = heap[size], 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= entry:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = entry
    return size


@inline
def _merge_heaped(symbols, ranks, count, keys, values):
    """The same by a heap of rank and place; an entry counts if its place still has that rank."""
    before, after = np.empty(count, np.int64), np.empty(count, np.int64)
    heap, size = np.empty(3 * count, np.int64), np.int64(0)
    for i in range(count):
        before[i], after[i] = i - 1, i + 1
        if i < count - 1 and ranks[i] >> 32 < NEVER:
            size = _push(heap, size, ranks[i] >> 32 << 32 | i)
    ranks[count - 1] = NEVER << 32
    while size:
        entry = heap[0]
        size = _pop(heap, size)
        at = entry & 0xFFFFFFFF
        if ranks[at] >> 32 != entry >> 32:
            continue
        gone = after[at]
        symbols[at] = ranks[at] & 0xFFFFFFFF
        symbols[gone] = -1
        ranks[gone] = ranks[at] = NEVER << 32
        after[at] = after[gone]
        if after[at] < count:
            before[after[at]] = at
        for left in (before[at], at):
            if left >= 0 and after[left] < count:
                ranks[left] = _pair(keys, values, symbols[left], symbols[after[left]])
                if ranks[left] >> 32 < NEVER:
                    size = _push(heap, size, ranks[left] >> 32 << 32 | left)
    kept = 0
    for i in range(count):
        if symbols[i] >= 0:
            symbols[kept] = symbols[i]
            kept += 1
    return kept


@inline
def _emit(symbols, ranks, count, keys, values, spelt, spelling, tokens, out):
    """Merge a row and write its tokens: a symbol's own, or those that spell it."""
    if count <= SCANNED:
        count = _merge_scanned(symbols, ranks, count, keys, values)
    else:
        count = _merge_heaped(symbols, ranks, count, keys, values)
    for i in range(count):
        for at in range(spelt[symbols[i]], spelt[symbols[i] + 1]):
            tokens[out] = spelling[at]
            out += 1
    return out


@inline
def _word_key(text, start, end):
    """A number for a word's bytes; other words may have it, too."""
    key = np.uint64(0xCBF29CE484222325)
    for at in range(start, end):
        key = (key ^ np.uint64(text[at])) * np.uint64(0x100000001B3)
    return np.int64(key >> np.uint64(1))


def _word_keys(text, ends, keys):
    start = np.int64(0)
    for i in range(len(ends)):
        keys[i] = _word_key(text, start, ends[i])
        start = ends[i]


def _merge_words(text, ends, bytes_, keys, values, spelt, spelling, word_keys, word_tokens, token_text, token_ends, tokens):
    """Byte-level BPE of words, given by their ends in the text; how many tokens it made."""
    longest = start = np.int64(0)
    for end in ends:
        longest, start = max(longest, end - start), end
    symbols, ranks = np.empty(longest, np.int64), np.empty(longest, np.int64)
    out = start = np.int64(0)
    for end in ends:
        whole = _whole_word(text, start, end, word_keys, word_tokens, token_text, token_ends)
        if whole >= 0:
            tokens[out] = whole
            out += 1
        else:
            for i in range(end - start):
                symbols[i] = bytes_[text[start + i]]
                if i:
                    ranks[i - 1] = _pair(keys, values, symbols[i - 1], symbols[i])
            out = _emit(symbols, ranks, end - start, keys, values, spelt, spelling, tokens, out)
        start = end
    return out


@inline
def _whole_word(text, start, end, word_keys, word_tokens, token_text, token_ends):
    """The token that a word is, or -1."""
    if not len(word_keys):
        return np.int64(-1)
    key = _word_key(text, start, end)
    at = slot(word_keys, key)
    if word_keys[at] == FREE:
        return np.int64(-1)
    token = word_tokens[at]
    token_start = token_ends[token - 1] if token else 0
    if token_ends[token] - token_start != end - start:
        return np.int64(-1)
    for i in range(end - start):
        if token_text[token_start + i] != text[start + i]:
            return np.int64(-1)
    return token


@inline
def _size(lead):
    return 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4


@inline
def _character(text, at):
    """The bytes up to where the next character begins, as a key, and their number."""
    size = min(_size(text[at]), len(text) - at)
    key = size
    for i in range(at, at + size):
        key = key << 8 | np.int64(text[i])
    return key, size


def _merge_text(text, char_keys, char_symbols, bytes_, keys, values, spelt, spelling, tokens):
    """BPE by score of a whole text; how many tokens it made. A byte that has no token gives -1 - byte.

    A row ends where two characters never stand side by side in any token, for nothing can be merged across.
    """
    symbols, ranks = np.empty(len(text), np.int64), np.empty(len(text), np.int64)
    out = at = count = np.int64(0)
    while at < len(text):
        key, size = _character(text, at)
        place = slot(char_keys, key)
        symbol = char_symbols[place] if char_keys[place] != FREE else np.int64(-1)
        if count:
            pair = slot(keys, symbols[count - 1] << 32 | symbol)
            if symbol < 0 or keys[pair] == FREE:
                out = _emit(symbols, ranks, count, keys, values, spelt, spelling, tokens, out)
                count = np.int64(0)
            else:
                ranks[count - 1] = values[pair]
        if symbol >= 0:
            symbols[count] = symbol
            count += 1
        else:
            for i in range(at, at + size):
                tokens[out] = bytes_[text[i]]
                out += 1
        at += size
    return _emit(symbols, ranks, count, keys, values, spelt, spelling, tokens, out)


def _last_seam(text, char_keys, char_symbols, keys):
    """The last place where a row of `_merge_text` ends; 0 if there is none."""
    seam = at = np.int64(0)
    before = np.int64(-1)
    while at + 4 <= len(text):  # of what is cut short at the end nothing can be said
        key, size = _character(text, at)
        place = slot(char_keys, key)
        symbol = char_symbols[place] if char_keys[place] != FREE else np.int64(-1)
        if symbol < 0 or before < 0 or keys[slot(keys, before << 32 | symbol)] == FREE:
            seam = at
        before = symbol
        at += size
    return seam


def word_keys() -> Any:
    return function(_word_keys, types.void(TEXT, I64, I64))


def merge_words() -> Any:
    return function(_merge_words, types.int64(U8, I64, I64, I64, I64, I64, I64, I64, I64, TEXT, I64, I32))


def merge_text() -> Any:
    return function(_merge_text, types.int64(TEXT, I64, I64, I64, I64, I64, I64, I64, I32))


def last_seam() -> Any:
    return function(_last_seam, types.int64(TEXT, I64, I64, I64))
