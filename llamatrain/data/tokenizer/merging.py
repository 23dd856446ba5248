"""Byte pair encoding, compiled.

Merging takes symbols (numbered texts) and a table of pairs: which two symbols that stand side by side may become which
third, and in which order: the pair of the lowest rank first, of equals the leftmost. Short rows are scanned for the
lowest, long ones keep the lowest of every 64, of 64 of those, and so on.
"""

from typing import Any

import numpy as np
from numba import types

from llamatrain.data.tokenizer.tables import FREE, I64, function, slot
from llamatrain.machine.jit import inline

NEVER = np.int64(0x7FFFFFFF)  # the rank of two that stand side by side in a token and do not merge
SCANNED = 40  # symbols in a row that is scanned; beyond, a tree is faster
FAN = 64
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
            ranks[at - 1] = _pair(keys, values, np.int64(symbols[at - 1]), np.int64(symbols[at]))
        if at < count - 1:
            ranks[at] = _pair(keys, values, np.int64(symbols[at]), np.int64(symbols[at + 1]))
    return count


@inline
def _lower(tree, bases, levels, at):
    """Bring the lowest ranks above a place up to date."""
    for level in range(1, levels):
        first = bases[level - 1] + at // FAN * FAN
        at //= FAN
        low = tree[first]
        for i in range(first + 1, min(first + FAN, bases[level])):
            low = min(low, tree[i])
        if tree[bases[level] + at] == low:
            return
        tree[bases[level] + at] = low


@inline
def _leftmost(tree, bases, levels):
    """The first place of the lowest rank."""
    at = np.int64(0)
    for level in range(levels - 2, -1, -1):
        at *= FAN
        while tree[bases[level] + at] != tree[bases[levels - 1]]:
            at += 1
    return at


@inline
def _grow(tree, bases, count):
    """Levels above the ranks of a row up to a single one, where each begins, and how many they are."""
    bases[0], levels = 0, np.int64(1)
    while count > 1:
        bases[levels] = bases[levels - 1] + count
        below, count = count, (count + FAN - 1) // FAN
        for at in range(count):
            low = tree[bases[levels - 1] + at * FAN]
            for i in range(at * FAN + 1, min(at * FAN + FAN, below)):
                low = min(low, tree[bases[levels - 1] + i])
            tree[bases[levels] + at] = low
        levels += 1
    return levels


@inline
def _span(symbols, at, count):
    """How many cells a symbol takes: of more than one the second and the last hold their number, negated."""
    return -np.int64(symbols[at + 1]) if at + 1 < count and symbols[at + 1] < 0 else np.int64(1)


@inline
def _rank(symbols, left, right, keys, values):
    return _pair(keys, values, np.int64(symbols[left]), np.int64(symbols[right])) >> 32


@inline
def _merge_long(symbols, tree, count, keys, values):
    """The same by a tree of ranks; a symbol stays in the cells of those that it was made of."""
    bases = np.empty(12, np.int64)
    tree[count - 1] = NEVER
    levels = _grow(tree, bases, count)
    while tree[bases[levels - 1]] < NEVER:
        at = _leftmost(tree, bases, levels)
        gone = at + _span(symbols, at, count)
        end = gone + _span(symbols, gone, count)
        symbols[at] = _pair(keys, values, np.int64(symbols[at]), np.int64(symbols[gone])) & 0xFFFFFFFF
        symbols[at + 1] = symbols[end - 1] = at - end
        tree[gone] = NEVER
        _lower(tree, bases, levels, gone)
        tree[at] = _rank(symbols, at, end, keys, values) if end < count else NEVER
        _lower(tree, bases, levels, at)
        if at:
            before = at + min(np.int64(symbols[at - 1]), -1)
            tree[before] = _rank(symbols, before, at, keys, values)
            _lower(tree, bases, levels, before)
    kept = at = np.int64(0)
    while at < count:
        span = _span(symbols, at, count)
        symbols[kept] = symbols[at]
        kept += 1
        at += span
    return kept


@inline
def _emit(symbols, ranks, count, keys, values, spelt, spelling, tokens, out):
    """Merge a row and write its tokens: a symbol's own, or those that spell it."""
    if count <= SCANNED:
        count = _merge_scanned(symbols, ranks, count, keys, values)
    else:
        count = _merge_long(symbols, tokens[out:], count, keys, values)
    for i in range(count):
        for at in range(spelt[symbols[i]], spelt[symbols[i] + 1]):
            tokens[out] = spelling[at]
            out += 1
    return out


@inline
def _rows(longest):
    """Room for a row of symbols, and its pairs where it is short."""
    return np.empty(longest, np.int32), np.empty(SCANNED, np.int64)


def room(most):
    """For so many tokens, and, before they are made, for the tree of a row of as many symbols in their place."""
    return most + most // (FAN - 1) + 12


@inline
def _keep(ranks, tokens, out, at, pair):
    """Of a row that may become long the ranks, as the tree's leaves, where its tokens will be."""
    if at < SCANNED:
        ranks[at] = pair
    tokens[out + at] = pair >> 32


@inline
def word_key(text, start, end):
    """A number for a word's bytes; other words may have it, too."""
    key = np.uint64(0xCBF29CE484222325)
    for at in range(start, end):
        key = (key ^ np.uint64(text[at])) * np.uint64(0x100000001B3)
    return np.int64(key >> np.uint64(1))


def _word_keys(text, ends, keys):
    start = np.int64(0)
    for i in range(len(ends)):
        keys[i] = word_key(text, start, ends[i])
        start = ends[i]


def _merge_words(text, ends, bytes_, keys, values, spelt, spelling, word_keys, word_tokens, token_text, token_ends, tokens):
    """Byte-level BPE of words, given by their ends in the text; how many tokens it made."""
    longest = start = np.int64(0)
    for end in ends:
        longest, start = max(longest, end - start), end
    symbols, ranks = _rows(longest)
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
                    _keep(ranks, tokens, out, i - 1, _pair(keys, values, np.int64(symbols[i - 1]), np.int64(symbols[i])))
            out = _emit(symbols, ranks, end - start, keys, values, spelt, spelling, tokens, out)
        start = end
    return out


@inline
def _whole_word(text, start, end, word_keys, word_tokens, token_text, token_ends):
    """The token that a word is, or -1."""
    if not len(word_keys):
        return np.int64(-1)
    key = word_key(text, start, end)
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
    symbols, ranks = _rows(len(text))
    out = at = count = np.int64(0)
    while at < len(text):
        key, size = _character(text, at)
        place = slot(char_keys, key)
        symbol = char_symbols[place] if char_keys[place] != FREE else np.int64(-1)
        if count:
            pair = slot(keys, np.int64(symbols[count - 1]) << 32 | symbol)
            if symbol < 0 or keys[pair] == FREE:
                out = _emit(symbols, ranks, count, keys, values, spelt, spelling, tokens, out)
                count = np.int64(0)
            else:
                _keep(ranks, tokens, out, count - 1, values[pair])
        if symbol >= 0:
            symbols[count] = symbol
            count += 1
        else:
            for i in range(at, at + size):
                tokens[out] = bytes_[text[i]]
                out += 1
        at += size
    return _emit(symbols, ranks, count, keys, values, spelt, spelling, tokens, out)


def _last_seam(text, space, char_keys, char_symbols, keys):
    """The last place where a row of `_merge_text` ends; 0 if there is none. Of spaces the text has the byte, `space` the key."""
    seam = at = np.int64(0)
    before = np.int64(-1)
    while at + 4 <= len(text):  # of what is cut short at the end nothing can be said
        key, size = _character(text, at)
        place = slot(char_keys, space if text[at] == 0x20 else key)
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
    return function(_last_seam, types.int64(TEXT, types.int64, I64, I64, I64))
