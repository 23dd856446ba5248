"""Byte pair encoding, compiled.

Merging takes symbols (numbered texts) and a table of pairs: which two symbols that stand side by side may become which
third, and in which order: the pair of the lowest rank first, of equals the leftmost. Short rows are scanned for the
lowest, long ones keep the lowest of every 64, of 64 of those, and so on.
"""

from typing import NamedTuple

import numpy as np

from llamatrain.compiler.declare import Function, I32s, I64s, Int, U8s, inline

# ---- hash tables -----------------------------------------------------------------

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


# ---- merging ---------------------------------------------------------------------

NEVER = np.int64(0x7FFFFFFF)  # the rank of two that stand side by side in a token and do not merge
SCANNED = 40  # symbols in a row that is scanned; beyond, a tree is faster
FAN = 64
LEVELS = 12  # of a tree, at most


class MergeBuffer(NamedTuple):
    """Room for a row of symbols, its pairs where it is short, and where the levels of its tree begin where it is long."""

    symbols: I32s
    ranks: I64s
    bases: I64s

    @staticmethod
    def of(longest: int) -> "MergeBuffer":
        return MergeBuffer(
            np.empty(longest, np.int32), np.empty(SCANNED, np.int64), np.empty(LEVELS, np.int64)
        )


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
def _merge_long(symbols, bases, tree, count, keys, values):
    """The same by a tree of ranks; a symbol stays in the cells of those that it was made of."""
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
def _emit(row, count, known, tokens, out):
    """Merge a row and write its tokens: a symbol's own, or those that spell it."""
    if count <= SCANNED:
        count = _merge_scanned(row.symbols, row.ranks, count, known.keys, known.values)
    else:
        count = _merge_long(row.symbols, row.bases, tokens[out:], count, known.keys, known.values)
    for i in range(count):
        for at in range(known.spelt[row.symbols[i]], known.spelt[row.symbols[i] + 1]):
            tokens[out] = known.spelling[at]
            out += 1
    return out


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


@Function
def word_keys(text: U8s, ends: I64s, keys: I64s) -> None:
    start = np.int64(0)
    for i in range(len(ends)):
        keys[i] = word_key(text, start, ends[i])
        start = ends[i]


@Function
def merge_words(
    text: U8s, ends: I64s, known: Symbols, whole: WholeWords, row: MergeBuffer, tokens: I32s
) -> Int:
    """Byte-level BPE of words, given by their ends in the text; how many tokens it made."""
    out = start = np.int64(0)
    for end in ends:
        token = _whole_word(text, start, end, whole)
        if token >= 0:
            tokens[out] = token
            out += 1
        else:
            for i in range(end - start):
                row.symbols[i] = known.bytes[text[start + i]]
                if i:
                    left, right = np.int64(row.symbols[i - 1]), np.int64(row.symbols[i])
                    _keep(row.ranks, tokens, out, i - 1, _pair(known.keys, known.values, left, right))
            out = _emit(row, end - start, known, tokens, out)
        start = end
    return out


@inline
def _whole_word(text, start, end, whole):
    """The token that a word is, or -1."""
    if not len(whole.keys):
        return np.int64(-1)
    at = slot(whole.keys, word_key(text, start, end))
    if whole.keys[at] == FREE:
        return np.int64(-1)
    token = whole.tokens[at]
    token_start = whole.ends[token - 1] if token else 0
    if whole.ends[token] - token_start != end - start:
        return np.int64(-1)
    for i in range(end - start):
        if whole.text[token_start + i] != text[start + i]:
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


@Function
def merge_text(text: U8s, characters: Characters, known: Symbols, row: MergeBuffer, tokens: I32s) -> Int:
    """BPE by score of a whole text; how many tokens it made. A byte that has no token gives -1 - byte.

    A row ends where two characters never stand side by side in any token, for nothing can be merged across.
    """
    out = at = count = np.int64(0)
    while at < len(text):
        key, size = _character(text, at)
        place = slot(characters.keys, key)
        symbol = characters.symbols[place] if characters.keys[place] != FREE else np.int64(-1)
        if count:
            pair = slot(known.keys, np.int64(row.symbols[count - 1]) << 32 | symbol)
            if symbol < 0 or known.keys[pair] == FREE:
                out = _emit(row, count, known, tokens, out)
                count = np.int64(0)
            else:
                _keep(row.ranks, tokens, out, count - 1, known.values[pair])
        if symbol >= 0:
            row.symbols[count] = symbol
            count += 1
        else:
            for i in range(at, at + size):
                tokens[out] = known.bytes[text[i]]
                out += 1
        at += size
    return _emit(row, count, known, tokens, out)


@inline
def _space_within(text, at, size):
    """How much of a character that lacks some of its bytes is there up to a space: of that, three bytes by then, it takes some,
    and what is left of them is no character's beginning."""
    for i in range(1, size):
        if text[at + i] == 0x20:
            return np.int64(i + 1)
    return size


@Function
def last_seam(text: U8s, space: int, characters: Characters, keys: I64s) -> Int:
    """The last place where a row of `merge_text` ends; 0 if there is none. Of spaces the text has the byte, `space` the key."""
    seam = at = np.int64(0)
    before = np.int64(-1)
    while at + 4 <= len(text):  # of what is cut short at the end nothing can be said
        key, size = _character(text, at)
        cut = _space_within(text, at, size)
        place = slot(characters.keys, space if text[at] == 0x20 else key)
        symbol = characters.symbols[place] if characters.keys[place] != FREE and cut == size else np.int64(-1)
        if symbol < 0 or before < 0 or keys[slot(keys, before << 32 | symbol)] == FREE:
            seam = at
        before = symbol
        at += cut
    return seam
