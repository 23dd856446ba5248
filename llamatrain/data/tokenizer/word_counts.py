"""Counts the pieces that text is split into before merging, to learn a vocabulary from them.

Memory is bounded. Pieces longer than MAX_WORD_BYTES, which are no words, count as parts of that length. If
the table is full, as with random text, the rare pieces are dropped.
"""

import codecs
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np

from llamatrain.compiler.declare import Function, I32s, I64s, Int, U8s, inline
from llamatrain.compiler.parallel import precompile
from llamatrain.data.tokenizer.bpe_merge import word_key
from llamatrain.data.tokenizer.pretokenize import RegexState, Splitter, code_points, split, to_byte_offsets
from llamatrain.data.tokenizer.regex import Expression
from llamatrain.data.tokenizer.tokenizer import to_bytes

# ---- a table of texts ------------------------------------------------------------


class TextTable(NamedTuple):
    """A hash table of distinct texts for compiled loops."""

    text: U8s
    ends: I32s  # 0, then the end of each text
    slots: I32s  # by hash: the number of each text, from 1 on

    @property
    def capacity(self) -> int:
        """The number of texts that fit."""
        return len(self.ends) - 1


def create_table(count: int, size: int) -> TextTable:
    """Create a table for `count` texts of `size` bytes in all."""
    slots = np.zeros(1 << (5 * count // 4).bit_length(), np.int32)
    return TextTable(np.empty(size, np.uint8), np.zeros(count + 1, np.int32), slots)


@inline
def find_text(known, source, start, end):
    """Return the slot of a text, or the free one for it."""
    mask = len(known.slots) - 1
    mixed = np.uint64(word_key(source, start, end)) * np.uint64(0x9E3779B97F4A7C15)
    at = np.int64(mixed >> np.uint64(32)) & mask
    while known.slots[at] and not _equals(known, known.slots[at], source, start, end):
        at = (at + 1) & mask
    return at


@inline
def _equals(known, number, source, start, end):
    begin = known.ends[number - 1]
    if known.ends[number] - begin != end - start:
        return False
    at = np.int64(0)
    while at < end - start and known.text[begin + at] == source[start + at]:
        at += 1
    return at == end - start


# ---- counting --------------------------------------------------------------------

MAX_WORD_BYTES = 256
MAX_PIECES = 1_000_000
MAX_PIECE_BYTES = 6_000_000  # limits of distinct pieces
BLOCK = 1 << 18  # characters split at once


@Function
def split_long_words(text: U8s, words: I64s, parts: I64s) -> Int:
    """Write the ends of words and of parts of long words, between characters; return how many there are."""
    count, start = np.int64(0), np.int64(0)
    for word in words:
        while word - start > MAX_WORD_BYTES:
            start += MAX_WORD_BYTES
            while text[start] & 0xC0 == 0x80:
                start -= 1
            parts[count] = start
            count += 1
        parts[count] = start = word
        count += 1
    return count


@Function
def count_pieces(
    source: U8s, ends: I64s, first: int, known: TextTable, counts: I32s, pieces: int
) -> tuple[Int, Int]:
    """Count pieces from `first` on until one does not fit.

    Return how many were counted, and how many are distinct.
    """
    for i in range(first, len(ends)):
        start, end = ends[i - 1] if i else np.int64(0), ends[i]
        at = find_text(known, source, start, end)
        if not known.slots[at]:
            begin = known.ends[pieces]
            if pieces == len(counts) or begin + end - start > len(known.text):
                return i, pieces
            for j in range(end - start):
                known.text[begin + j] = source[start + j]
            pieces += 1
            known.ends[pieces], known.slots[at] = begin + end - start, pieces
        counts[known.slots[at] - 1] += 1
    return np.int64(len(ends)), pieces


class WordCounter:
    """Splits texts into pieces by an expression, and counts them."""

    def __init__(self, expression: Expression) -> None:
        self.cut = Splitter.bind(expression)
        precompile((code_points, split, to_byte_offsets, split_long_words, count_pieces))
        self.known = create_table(MAX_PIECES, MAX_PIECE_BYTES)
        self.counts = np.zeros(MAX_PIECES, np.int32)
        self.pieces = 0

    def add(self, text: str | bytes) -> None:
        """Count the pieces of a text as if it were split whole; only a piece that fills a block is cut."""
        rest = b""
        blocks = chain(utf8_blocks(text), [None])
        for block in blocks:
            raw = np.frombuffer(rest + (block or b""), np.uint8)
            ends, used = self._split(raw, last=block is None)
            self._count_all(raw, ends)
            rest = raw[used:].tobytes()

    def _split(self, raw: np.ndarray, last: bool) -> tuple[np.ndarray, int]:
        """Return the ends of the pieces that following text cannot change, and the bytes they take."""
        codes = np.empty(len(raw), np.int32)
        codes = codes[: code_points(raw, codes, np.empty(3 * len(raw), np.uint8))[0]]
        if not len(codes):
            return np.zeros(0, np.int64), 0
        word_ends = np.empty(len(codes), np.int64)
        marks = np.empty(len(codes), np.uint32)
        pieces = np.array([len(codes)], np.int64)
        number, settled, _ = split(codes, self.cut, pieces, word_ends, marks, RegexState.allocate())
        used = len(codes) if last or not settled else settled
        word_ends = word_ends[:number][word_ends[:number] <= used]
        to_byte_offsets(raw, word_ends)
        return word_ends, int(word_ends[-1])

    def _count_all(self, raw: np.ndarray, word_ends: np.ndarray) -> None:
        parts = np.empty(len(word_ends) + len(raw) // (MAX_WORD_BYTES - 3) + 1, np.int64)
        parts = parts[: split_long_words(raw, word_ends, parts)]
        done = 0
        while True:
            done, self.pieces = count_pieces(raw, parts, done, self.known, self.counts, self.pieces)
            if done == len(parts):
                return
            self._drop_rare()

    def _drop_rare(self) -> None:
        """Drop the rarest pieces, of equals the oldest, until half of the table is free."""
        ends = self.known.ends[: self.pieces + 1].copy()
        counts = self.counts[: self.pieces].copy()
        sizes = np.diff(ends)
        order = np.argsort(counts, kind="stable")[::-1]
        order = order[: MAX_PIECES // 2]
        is_kept = np.zeros(len(counts), bool)
        is_kept[order[np.cumsum(sizes[order]) <= MAX_PIECE_BYTES // 2]] = True
        text = self.known.text[: ends[-1]][np.repeat(is_kept, sizes)]
        self.known.slots[:] = self.counts[:] = 0
        self.pieces = count_pieces(
            text, np.cumsum(sizes[is_kept], dtype=np.int64), 0, self.known, self.counts, 0
        )[1]
        self.counts[: self.pieces] = counts[is_kept]


def utf8_blocks(text: str | bytes) -> Iterator[bytes]:
    """Yield text as blocks of valid UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for at in range(0, len(text), BLOCK):
        yield decoder.decode(to_bytes(text[at : at + BLOCK]), at + BLOCK >= len(text)).encode()
