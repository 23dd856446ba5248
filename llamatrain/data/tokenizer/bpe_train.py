"""Learns merges from counted pieces of text: the most frequent adjacent pair, again and again.

Of equals, the pair of the lower tokens merges first. A pair is searched only in the pieces that were listed
when it appeared, so the work grows with the text and not with the number of merges. If a table is full, all
pairs are counted again, without the rarest ones, until none is left over.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from llamatrain.compiler.declare import Function, I32s, I64Rows, I64s, Int, inline
from llamatrain.compiler.parallel import precompile
from llamatrain.data.tokenizer.bpe_merge import FREE, slot
from llamatrain.data.tokenizer.word_counts import MAX_WORD_BYTES, TextTable, create_table, find_text

# ---- pairs and their heap --------------------------------------------------------

TOKENS, ENTRIES, HEAP, LISTED, PAIRED, FULL = range(6)  # indices into the trainer's state


class PieceList(NamedTuple):
    """Pieces of text as symbols, with their counts."""

    symbols: I32s
    starts: I32s
    sizes: I32s  # in symbols; shrinks with every merge
    counts: I32s


class PairTable(NamedTuple):
    """A table of pairs for `slot`: left symbol in the high half, right one in the low half."""

    keys: I64s
    counts: I32s
    seen: I32s  # the last piece listed for it
    entry: I32s  # its latest entry


class PairHeap(NamedTuple):
    """Entries, each a pair with the pieces to search for it, and a heap of them."""

    pairs: I32s  # their slots in the table
    counts: I32s  # of the pair when it was inserted
    starts: I32s  # offset of its pieces in `listed`
    heap: I32s
    listed: I32s


@inline
def _precedes(queue, pairs, one, other):
    if queue.counts[one] != queue.counts[other]:
        return queue.counts[one] > queue.counts[other]
    return pairs.keys[queue.pairs[one]] < pairs.keys[queue.pairs[other]]


@inline
def push(queue, pairs, size, entry):
    """Insert an entry into the heap."""
    at = size
    while at and _precedes(queue, pairs, entry, queue.heap[(at - 1) >> 1]):
        queue.heap[at] = queue.heap[(at - 1) >> 1]
        at = (at - 1) >> 1
    queue.heap[at] = entry


@inline
def sink(queue, pairs, size, entry):
    """Replace the first entry of the heap."""
    at = np.int64(0)
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and _precedes(queue, pairs, queue.heap[child + 1], queue.heap[child]):
            child += 1
        if not _precedes(queue, pairs, queue.heap[child], entry):
            break
        queue.heap[at] = queue.heap[child]
        at = child
    queue.heap[at] = entry


@inline
def pair_key(left, right):
    """Return the key of a pair."""
    return np.int64(left) << 32 | right


@inline
def find_pair(pairs, state, key):
    """Return the slot of a pair; insert it if it is new."""
    at = slot(pairs.keys, key)
    if pairs.keys[at] == FREE:
        pairs.keys[at], pairs.counts[at], pairs.seen[at], pairs.entry[at] = key, 0, -1, -1
        state[PAIRED] += 1
        if state[PAIRED] > 3 * len(pairs.keys) // 4:
            state[FULL] = 1
    return at


@Function
def count_pairs(pieces: PieceList, first: int, pairs: PairTable, state: I64s) -> Int:
    """Count the pairs of the pieces from `first` on until the table is full; return the next piece."""
    for piece in range(first, len(pieces.sizes)):
        if state[FULL]:
            return piece
        start = pieces.starts[piece]
        for at in range(start + 1, start + pieces.sizes[piece]):
            pairs.counts[find_pair(pairs, state, pair_key(pieces.symbols[at - 1], pieces.symbols[at]))] += (
                pieces.counts[piece]
            )
    return np.int64(len(pieces.sizes))


@Function
def build_heap(pieces: PieceList, pairs: PairTable, queue: PairHeap, state: I64s) -> None:
    """Make an entry of each pair, with its pieces, and the heap."""
    entries = np.int64(0)
    for at in range(len(pairs.keys)):
        if pairs.keys[at] != FREE:
            pairs.seen[at], pairs.entry[at] = -1, entries
            queue.pairs[entries], queue.counts[entries], queue.starts[entries] = at, pairs.counts[at], 0
            entries += 1
    for piece in range(len(pieces.sizes)):
        _list_piece(pieces, piece, pairs, queue, False)
    total = np.int64(0)
    for entry in range(entries):
        total += queue.starts[entry]
        queue.starts[entry] = total
        pairs.seen[queue.pairs[entry]] = -1
    queue.starts[entries] = total
    for piece in range(len(pieces.sizes)):
        _list_piece(pieces, piece, pairs, queue, True)
    for entry in range(entries):
        push(queue, pairs, entry, entry)
    state[ENTRIES], state[HEAP], state[LISTED] = entries, entries, total


@inline
def _list_piece(pieces, piece, pairs, queue, noted):
    """Count a piece for each of its pairs, or if `noted`, list it."""
    start = pieces.starts[piece]
    for i in range(start + 1, start + pieces.sizes[piece]):
        at = slot(pairs.keys, pair_key(pieces.symbols[i - 1], pieces.symbols[i]))
        if pairs.keys[at] != FREE and pairs.seen[at] != piece:
            pairs.seen[at], entry = piece, pairs.entry[at]
            if noted:
                queue.starts[entry] -= 1
                queue.listed[queue.starts[entry]] = piece
            else:
                queue.starts[entry] += 1


@Function
def insert_pairs(keys: I64s, counts: I32s, pairs: PairTable, state: I64s) -> None:
    """Insert pairs with their counts."""
    for i in range(len(keys)):
        pairs.counts[find_pair(pairs, state, keys[i])] = counts[i]


# ---- learning --------------------------------------------------------------------

MIN_COUNT = 2  # of a pair that is merged
MAX_PAIRS = 1 << 20  # slots of their table
MAX_LISTED = 10_000_000
EFFORT = 1 << 24  # symbols examined before control returns to Python


@Function
def learn(
    pieces: PieceList,
    pairs: PairTable,
    queue: PairHeap,
    tokens: TextTable,
    state: I64s,
    merges: I64Rows,
    most: int,
) -> Int:
    """Merge the first pairs of the heap and write them to `merges`; return their number."""
    count, effort = np.int64(0), np.int64(0)
    while (
        count < len(merges)
        and effort < EFFORT
        and state[TOKENS] < most
        and state[HEAP] > 0
        and state[FULL] == 0
    ):
        entry = queue.heap[0]
        at = queue.pairs[entry]
        if queue.counts[entry] != pairs.counts[at]:
            queue.counts[entry] = pairs.counts[at]
            sink(queue, pairs, state[HEAP], entry)
            continue
        if queue.counts[entry] < MIN_COUNT:
            state[HEAP] = 0
            break
        state[HEAP] -= 1
        sink(queue, pairs, state[HEAP], queue.heap[state[HEAP]])
        left, right = pairs.keys[at] >> 32, pairs.keys[at] & 0xFFFFFFFF
        merges[count, 0], merges[count, 1] = left, right
        count += 1
        effort += _merge(
            pieces, pairs, queue, state, entry, left, right, _add_token(tokens, state, left, right)
        )
    return count


@inline
def _add_token(tokens, state, left, right):
    """Return the token for the text of two tokens, which another pair may have produced before."""
    start = end = tokens.ends[state[TOKENS]]
    for part in (left, right):
        for at in range(tokens.ends[part], tokens.ends[part + 1]):
            tokens.text[end] = tokens.text[at]
            end += 1
    at = find_text(tokens, tokens.text, start, end)
    if not tokens.slots[at]:
        state[TOKENS] += 1
        tokens.ends[state[TOKENS]], tokens.slots[at] = end, state[TOKENS]
    return np.int64(tokens.slots[at] - 1)


@inline
def _merge(pieces, pairs, queue, state, entry, left, right, token):
    """Merge a pair in an entry's pieces, and make entries of new pairs.

    Return how many symbols were examined.
    """
    effort, first, notes = np.int64(1), state[ENTRIES], np.int64(len(queue.listed))
    for i in range(queue.starts[entry], queue.starts[entry + 1]):
        piece = queue.listed[i]
        effort += pieces.sizes[piece]
        notes = _merge_piece(pieces, piece, pairs, queue, state, left, right, token, first, notes)
    if state[FULL]:
        return effort
    top = state[LISTED]
    for new in range(first, state[ENTRIES]):
        top += queue.starts[new]
        queue.starts[new] = top
    queue.starts[state[ENTRIES]] = state[LISTED] = top
    for at in range(notes, len(queue.listed), 2):
        new = queue.listed[at]
        queue.starts[new] -= 1
        queue.listed[queue.starts[new]] = queue.listed[at + 1]
    for new in range(first, state[ENTRIES]):
        queue.counts[new] = pairs.counts[queue.pairs[new]]
        if queue.counts[new] > 0:
            push(queue, pairs, state[HEAP], new)
            state[HEAP] += 1
    return effort


@inline
def _merge_piece(pieces, piece, pairs, queue, state, left, right, token, first, notes):
    start, size, count = pieces.starts[piece], pieces.sizes[piece], pieces.counts[piece]
    row, kept, at = pieces.symbols[start:], np.int64(0), np.int64(0)
    while at < size:
        if row[at] == left and at + 1 < size and row[at + 1] == right:
            if kept:
                _subtract(pairs, row[kept - 1], left, count)
                notes = _add(pairs, queue, state, row[kept - 1], token, count, piece, first, notes)
            if at + 2 < size:
                _subtract(pairs, right, row[at + 2], count)
                notes = _add(pairs, queue, state, token, row[at + 2], count, piece, first, notes)
            row[kept] = token
            at += 2
        else:
            row[kept] = row[at]
            at += 1
        kept += 1
    pieces.sizes[piece] = kept
    return notes


@inline
def _subtract(pairs, left, right, count):
    at = slot(pairs.keys, pair_key(left, right))
    if pairs.keys[at] != FREE:
        pairs.counts[at] -= count


@inline
def _add(pairs, queue, state, left, right, count, piece, first, notes):
    """Count a new pair, and list the piece for its entry.

    The list is filled from its end down; return how far down.
    """
    if state[FULL]:
        return notes
    at = find_pair(pairs, state, pair_key(left, right))
    pairs.counts[at] += count
    if pairs.entry[at] < first:
        new = state[ENTRIES]
        state[ENTRIES] += 1
        pairs.entry[at], pairs.seen[at] = new, -1
        queue.pairs[new], queue.starts[new] = at, 0
    if pairs.seen[at] != piece:
        pairs.seen[at] = piece
        queue.starts[pairs.entry[at]] += 1
        notes -= 2
        queue.listed[notes], queue.listed[notes + 1] = pairs.entry[at], piece
    # Stop unless one more note fits, and all notes fit into the list.
    if state[LISTED] + (len(queue.listed) - notes) // 2 + 3 > notes or state[ENTRIES] == len(queue.pairs):
        state[FULL] = 1
    return notes


# ---- the trainer -----------------------------------------------------------


class BpeTrainer:
    """Learns merges from pieces; its first tokens are the bytes in the given order."""

    def __init__(self, known: TextTable, counts: np.ndarray, letters: bytes, max_tokens: int) -> None:
        precompile((count_pairs, build_heap, learn))
        bounds = known.ends[: len(counts) + 1].copy()
        order = np.frombuffer(letters, np.uint8)
        symbols = np.argsort(order).astype(np.int32)[known.text[: bounds[-1]]]
        self.pieces = PieceList(symbols, bounds[:-1], np.diff(bounds), counts.copy())
        places = min(MAX_PAIRS, 1 << (4 * len(symbols) + 1000).bit_length())
        self.pairs = PairTable(np.empty(places, np.int64), *(np.empty(places, np.int32) for _ in range(3)))
        lengths = places, places, places + 1, places, min(5 * len(symbols) + 1000, MAX_LISTED)
        self.queue = PairHeap(*(np.empty(length, np.int32) for length in lengths))
        self.tokens = create_table(max_tokens, (max_tokens + 1) * MAX_WORD_BYTES)
        self.state = np.zeros(6, np.int64)
        self.tokens.text[:256], self.tokens.ends[:257] = order, np.arange(257)
        self.max_tokens, self.state[TOKENS] = max_tokens, 256

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield the merged pairs, some at a time."""
        merges = np.empty((1024, 2), np.int64)
        left_out = self._count_all()
        merged = len(merges)
        while self.state[TOKENS] < self.max_tokens and merged >= len(merges):
            build_heap(self.pieces, self.pairs, self.queue, self.state)
            merged = 0
            while self.state[TOKENS] < self.max_tokens and self.state[HEAP] and not self.state[FULL]:
                count = learn(
                    self.pieces, self.pairs, self.queue, self.tokens, self.state, merges, self.max_tokens
                )
                yield merges[:count]
                merged += count
            if self.state[FULL]:
                merged = len(merges)
            elif not left_out:
                return
            left_out = self._count_all() | self._drop_rare(MIN_COUNT, len(self.pairs.keys) // 4)

    @property
    def learned_count(self) -> int:
        """The number of tokens learned so far."""
        return int(self.state[TOKENS]) - 256

    def token_bytes(self) -> Iterator[bytes]:
        """Yield the bytes of all tokens."""
        ends = self.tokens.ends[: self.state[TOKENS] + 1].tolist()
        return (self.tokens.text[start:end].tobytes() for start, end in pairwise(ends))

    def _count_all(self) -> bool:
        """Count the pairs of all pieces; return True if pairs were dropped that are frequent enough."""
        self._clear()
        done = 0
        left_out = False
        while (done := count_pairs(self.pieces, done, self.pairs, self.state)) < len(self.pieces.sizes):
            self._drop_rare(1, len(self.pairs.keys) // 2)
            left_out = True
        return left_out

    def _clear(self) -> None:
        self.pairs.keys[:] = FREE
        self.state[PAIRED] = self.state[FULL] = 0

    def _drop_rare(self, least: int, room: int) -> bool:
        """Drop the rarest pairs until the others fit; return True if any of them could have been merged."""
        is_kept = self.pairs.keys != FREE
        counts = self.pairs.counts
        while np.count_nonzero(is_kept & (counts >= least)) > room:
            least *= 2
        is_kept &= counts >= least
        keys = self.pairs.keys[is_kept]
        counts = self.pairs.counts[is_kept]
        self._clear()
        insert_pairs(keys, counts, self.pairs, self.state)
        return least > MIN_COUNT
