"""Merges symbols by byte pair encoding, compiled.

Merging takes symbols (numbered texts) and a table of pairs: which two adjacent symbols become which third,
and their rank. The pair of the lowest rank merges first, of equals the leftmost. Short rows are scanned for
the lowest rank; long ones keep the lowest of every 64, of 64 of those, and so on.
"""

from typing import NamedTuple

import numpy as np

from llamatrain.compiler.declare import Function, I32s, I64s, Int, U8s, inline

# ---- hash tables -----------------------------------------------------------------

FREE = np.int64(-1)  # a free slot


class Symbols(NamedTuple):
    """The symbols of a vocabulary, and the table of their merges."""

    bytes: I64s  # of each byte: its symbol, or in `llama` vocabularies its token
    keys: I64s  # pairs: left symbol in the high half, right one in the low half
    values: I64s  # rank in the high half, result in the low half
    spelt: I64s  # offsets of each symbol's tokens in `spelling`
    spelling: I64s


class Characters(NamedTuple):
    """The table of symbols that are single characters."""

    keys: I64s
    symbols: I64s


class WholeWords(NamedTuple):
    """Tokens by their bytes, as a table of `word_key`; empty if words are always merged."""

    keys: I64s
    tokens: I64s
    text: U8s  # of all tokens
    ends: I64s  # the end of each token


@inline
def slot(keys, key):
    """Return the slot of a key, or the free one for it, in a table whose size is a power of two."""
    mask = len(keys) - 1
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    at = np.int64(mixed >> np.uint64(32)) & mask
    while keys[at] != key and keys[at] != FREE:
        at = (at + 1) & mask
    return at


@Function
def fill_table(new_keys: I64s, new_values: I64s, keys: I64s, values: I64s) -> None:
    """Insert keys with their values; the first value of a repeated key wins."""
    for i in range(len(new_keys)):
        at = slot(keys, new_keys[i])
        if keys[at] == FREE:
            keys[at] = new_keys[i]
            values[at] = new_values[i]


def build_table(keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Build a hash table for `slot` from keys that are not negative."""
    size = 1 << max(1, 2 * len(keys) - 1).bit_length()
    table_keys, table_values = np.full(size, FREE), np.zeros(size, np.int64)
    fill_table(
        np.ascontiguousarray(keys, np.int64), np.ascontiguousarray(values, np.int64), table_keys, table_values
    )
    return table_keys, table_values


# ---- merging ---------------------------------------------------------------------

NEWLINE = 0x0A
NEVER = np.int64(0x7FFFFFFF)  # the rank of symbols that are adjacent in a token but do not merge
SCANNED = 40  # longest row that is scanned; for longer ones a tree is faster
FAN = 64
LEVELS = 12  # of a tree at most


class MergeBuffer(NamedTuple):
    """Memory for a row of symbols, the pairs of a short row, and the level offsets of a long row's tree."""

    symbols: I32s
    ranks: I64s
    bases: I64s

    @staticmethod
    def allocate(longest: int) -> "MergeBuffer":
        """Allocate memory for rows of up to `longest` symbols."""
        return MergeBuffer(
            np.empty(longest, np.int32), np.empty(SCANNED, np.int64), np.empty(LEVELS, np.int64)
        )


@inline
def _pair(keys, values, left, right):
    """Return the rank of a pair (high half) and its result (low half); NEVER and 0 if they do not merge."""
    at = slot(keys, left << 32 | right)
    return values[at] if keys[at] != FREE else NEVER << 32


@inline
def _merge_scanned(symbols, ranks, count, keys, values):
    """Merge a short row in place; return the number of symbols left.

    `ranks` holds its first `count - 1` pairs.
    """
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
    """Update the lowest ranks above a leaf of the tree."""
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
    """Return the first leaf of the lowest rank."""
    at = np.int64(0)
    for level in range(levels - 2, -1, -1):
        at *= FAN
        while tree[bases[level] + at] != tree[bases[levels - 1]]:
            at += 1
    return at


@inline
def _grow(tree, bases, count):
    """Build the levels above the ranks of a row; return how many there are."""
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
    """Return how many cells a symbol takes: if several, the second and the last hold their negated number."""
    return -np.int64(symbols[at + 1]) if at + 1 < count and symbols[at + 1] < 0 else np.int64(1)


@inline
def _rank(symbols, left, right, keys, values):
    return _pair(keys, values, np.int64(symbols[left]), np.int64(symbols[right])) >> 32


@inline
def _merge_long(symbols, bases, tree, count, keys, values):
    """Merge a long row by a tree of ranks; a symbol keeps the cells of those that it was merged from."""
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


def buffer_size(max_tokens):
    """Return the size of the token buffer.

    It also holds the tree of a row before its tokens are written.
    """
    return max_tokens + max_tokens // (FAN - 1) + 12


@inline
def _keep(ranks, tokens, out, at, pair):
    """Keep the rank of a pair of a row that may become long, as a leaf of the tree in the token buffer."""
    if at < SCANNED:
        ranks[at] = pair
    tokens[out + at] = pair >> 32


@inline
def word_key(text, start, end):
    """Return a hash of a word's bytes; it is not unique."""
    key = np.uint64(0xCBF29CE484222325)
    for at in range(start, end):
        key = (key ^ np.uint64(text[at])) * np.uint64(0x100000001B3)
    return np.int64(key >> np.uint64(1))


@Function
def word_keys(text: U8s, ends: I64s, keys: I64s) -> None:
    """Hash all words of a text, given by their ends."""
    start = np.int64(0)
    for i in range(len(ends)):
        keys[i] = word_key(text, start, ends[i])
        start = ends[i]


@Function
def merge_words(
    text: U8s, ends: I64s, known: Symbols, whole: WholeWords, row: MergeBuffer, tokens: I32s
) -> Int:
    """Tokenize words by byte-level BPE, given by their ends in the text; return the number of tokens."""
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
    """Return the token that equals a word, or -1."""
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
    """Return the key of the character at an offset, and its number of bytes."""
    size = min(_size(text[at]), len(text) - at)
    key = size
    for i in range(at, at + size):
        key = key << 8 | np.int64(text[i])
    return key, size


@Function
def merge_text(
    text: U8s, characters: Characters, known: Symbols, lines: I64s, row: MergeBuffer, tokens: I32s
) -> Int:
    """Tokenize a whole text by characters; return the number of tokens. A byte without a token is negative.

    A row ends where two characters are never adjacent in any token, because nothing merges across. `lines`
    has the token of each number of newlines, or -1; a run of newlines that has one is not merged.
    """
    out = at = count = run_end = np.int64(0)
    while at < len(text):
        if len(lines) and text[at] == NEWLINE and at >= run_end:
            while run_end <= at or (run_end < len(text) and text[run_end] == NEWLINE):
                run_end = max(run_end, at) + 1
            if run_end - at < len(lines) and lines[run_end - at] >= 0:
                out = _emit(row, count, known, tokens, out)
                tokens[out] = lines[run_end - at]
                out += 1
                count, at = np.int64(0), run_end
                continue
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
    """Return the bytes of an incomplete character up to and including a space, or all of them.

    Three bytes include a space, and the rest does not begin a character.
    """
    for i in range(1, size):
        if text[at + i] == 0x20:
            return np.int64(i + 1)
    return size


@Function
def last_seam(text: U8s, space: int, characters: Characters, keys: I64s) -> Int:
    """Return the last offset where a row of `merge_text` ends, or 0.

    The text has spaces as bytes; `space` is the key of the character that replaces them.
    """
    seam = at = np.int64(0)
    before = np.int64(-1)
    while at + 4 <= len(text):  # an incomplete character at the end is undecided
        key, size = _character(text, at)
        cut = _space_within(text, at, size)
        place = slot(characters.keys, space if text[at] == 0x20 else key)
        symbol = characters.symbols[place] if characters.keys[place] != FREE and cut == size else np.int64(-1)
        if symbol < 0 or before < 0 or keys[slot(keys, before << 32 | symbol)] == FREE:
            seam = at
        before = symbol
        at += cut
    return seam
