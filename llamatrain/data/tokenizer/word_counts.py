"""The pieces that text is cut into before it is merged, each once, with how often it comes: what a vocabulary is learned from.

What is kept is bounded. Of pieces longer than LONGEST bytes, which are no words, parts of that length count. Where more
different ones come than the table has room for, as in text that is random, the rare ones are given up.
"""

import codecs
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np

from llamatrain.compiler.declare import Function, I32s, I64s, Int, U8s, inline
from llamatrain.compiler.parallel import precompile
from llamatrain.data.tokenizer.bpe_merge import word_key
from llamatrain.data.tokenizer.pretokenize import RegexState, Splitter, code_points, in_bytes, split
from llamatrain.data.tokenizer.regex import Expression
from llamatrain.data.tokenizer.tokenizer import to_bytes

# ---- a table of texts ------------------------------------------------------------


class TextTable(NamedTuple):
    text: U8s
    ends: I32s  # where each ends in it, behind a 0
    slots: I32s  # by their keys: the number of each, from 1 on

    @property
    def room(self) -> int:
        return len(self.ends) - 1


def room_for(count: int, size: int) -> TextTable:
    """An empty table for so many texts of so many bytes in all."""
    slots = np.zeros(1 << (5 * count // 4).bit_length(), np.int32)
    return TextTable(np.empty(size, np.uint8), np.zeros(count + 1, np.int32), slots)


@inline
def find(known, source, start, end):
    """The slot of a text, or the free one where it would be."""
    mask = len(known.slots) - 1
    mixed = np.uint64(word_key(source, start, end)) * np.uint64(0x9E3779B97F4A7C15)
    at = np.int64(mixed >> np.uint64(32)) & mask
    while known.slots[at] and not _is(known, known.slots[at], source, start, end):
        at = (at + 1) & mask
    return at


@inline
def _is(known, number, source, start, end):
    begin = known.ends[number - 1]
    if known.ends[number] - begin != end - start:
        return False
    at = np.int64(0)
    while at < end - start and known.text[begin + at] == source[start + at]:
        at += 1
    return at == end - start


# ---- counting --------------------------------------------------------------------

LONGEST = 256
PIECES, BYTES = 1_000_000, 6_000_000  # of different ones
BLOCK = 1 << 18  # characters that are cut at once


@Function
def parted(text: U8s, words: I64s, parts: I64s) -> Int:
    """The words' ends with those of the parts of long ones, between characters; how many there are."""
    count, start = np.int64(0), np.int64(0)
    for word in words:
        while word - start > LONGEST:
            start += LONGEST
            while text[start] & 0xC0 == 0x80:
                start -= 1
            parts[count] = start
            count += 1
        parts[count] = start = word
        count += 1
    return count


@Function
def count(
    source: U8s, ends: I64s, first: int, known: TextTable, counts: I32s, pieces: int
) -> tuple[Int, Int]:
    """Count the pieces from the first on, up to one that has no room; how many were counted, and are known."""
    for i in range(first, len(ends)):
        start, end = ends[i - 1] if i else np.int64(0), ends[i]
        at = find(known, source, start, end)
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
    """Cuts texts into pieces by an expression, and counts them."""

    def __init__(self, expression: Expression) -> None:
        self.cut = Splitter.by(expression)
        precompile((code_points, split, in_bytes, parted, count))
        self.known, self.counts, self.pieces = room_for(PIECES, BYTES), np.zeros(PIECES, np.int32), 0

    def add(self, text: str | bytes) -> None:
        """A text, as if it were cut whole; only where a block of it is one piece that piece is cut."""
        rest, blocks = b"", chain(blocks_of(text), [None])
        for block in blocks:
            raw = np.frombuffer(rest + (block or b""), np.uint8)
            ends, taken = self._words(raw, last=block is None)
            self._count_all(raw, ends)
            rest = raw[taken:].tobytes()

    def _words(self, raw: np.ndarray, last: bool) -> tuple[np.ndarray, int]:
        """The ends of its pieces, as far as what follows cannot change them."""
        codes = np.empty(len(raw), np.int32)
        codes = codes[: code_points(raw, codes, np.empty(3 * len(raw), np.uint8))[0]]
        if not len(codes):
            return np.zeros(0, np.int64), 0
        words, marks = np.empty(len(codes), np.int64), np.empty(len(codes), np.uint32)
        whole = np.array([len(codes)], np.int64)
        number, settled = split(codes, self.cut, whole, words, marks, RegexState.new())
        taken = len(codes) if last or not settled else settled
        words = words[:number][words[:number] <= taken]
        in_bytes(raw, words)
        return words, int(words[-1])

    def _count_all(self, raw: np.ndarray, words: np.ndarray) -> None:
        parts = np.empty(len(words) + len(raw) // (LONGEST - 3) + 1, np.int64)
        parts = parts[: parted(raw, words, parts)]
        done = 0
        while True:
            done, self.pieces = count(raw, parts, done, self.known, self.counts, self.pieces)
            if done == len(parts):
                return
            self._thin()

    def _thin(self) -> None:
        """Give up those that came least often, of equals the oldest, until half of the table is free."""
        ends, counts = self.known.ends[: self.pieces + 1].copy(), self.counts[: self.pieces].copy()
        sizes, order = np.diff(ends), np.argsort(counts, kind="stable")[::-1]
        order = order[: PIECES // 2]
        kept = np.zeros(len(counts), bool)
        kept[order[np.cumsum(sizes[order]) <= BYTES // 2]] = True
        text = self.known.text[: ends[-1]][np.repeat(kept, sizes)]
        self.known.slots[:] = self.counts[:] = 0
        self.pieces = count(text, np.cumsum(sizes[kept], dtype=np.int64), 0, self.known, self.counts, 0)[1]
        self.counts[: self.pieces] = counts[kept]


def blocks_of(text: str | bytes) -> Iterator[bytes]:
    """As UTF-8, what is none replaced."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for at in range(0, len(text), BLOCK):
        yield decoder.decode(to_bytes(text[at : at + BLOCK]), at + BLOCK >= len(text)).encode()
