"""Learns which pairs to merge from counted pieces: of all pairs of neighbours the most frequent, again and again.

Of equals it is the pair of the lower tokens. A pair is looked for only in the pieces that were noted when it came up, so the
work grows with the text and not with the number of merges. Where a table is full, all is counted anew, and the rarest pairs
are left out until no other is left.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from llamatrain.compiler.declare import Function, I32s, I64Rows, I64s, Int, inline
from llamatrain.compiler.parallel import precompile
from llamatrain.data.tokenizer.bpe_merge import FREE, slot
from llamatrain.data.tokenizer.word_counts import LONGEST, TextTable, find, room_for

# ---- pairs and their heap --------------------------------------------------------

TOKENS, ENTRIES, HEAP, LISTED, PAIRED, FULL = range(
    6
)  # numbers of a learner: how many there are, and whether a table is full


class PieceList(NamedTuple):
    symbols: I32s
    starts: I32s
    sizes: I32s  # in symbols, less with every merge
    counts: I32s


class PairTable(NamedTuple):
    """A table by `slot`: left above, right below."""

    keys: I64s
    counts: I32s
    seen: I32s  # the last piece that was noted for it
    entry: I32s  # its latest


class PairHeap(NamedTuple):
    """Entries, each a pair with pieces to look for it in, and a heap of them."""

    pairs: I32s  # their places in the table
    counts: I32s  # of the pair when it was put there
    starts: I32s  # of its pieces among all that are listed
    heap: I32s
    listed: I32s


@inline
def _before(queue, pairs, one, other):
    if queue.counts[one] != queue.counts[other]:
        return queue.counts[one] > queue.counts[other]
    return pairs.keys[queue.pairs[one]] < pairs.keys[queue.pairs[other]]


@inline
def push(queue, pairs, size, entry):
    at = size
    while at and _before(queue, pairs, entry, queue.heap[(at - 1) >> 1]):
        queue.heap[at] = queue.heap[(at - 1) >> 1]
        at = (at - 1) >> 1
    queue.heap[at] = entry


@inline
def sink(queue, pairs, size, entry):
    """Put an entry in the place of the first."""
    at = np.int64(0)
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and _before(queue, pairs, queue.heap[child + 1], queue.heap[child]):
            child += 1
        if not _before(queue, pairs, queue.heap[child], entry):
            break
        queue.heap[at] = queue.heap[child]
        at = child
    queue.heap[at] = entry


@inline
def pair_key(left, right):
    return np.int64(left) << 32 | right


@inline
def found(pairs, state, key):
    """The place of a pair, which it gets if it has none."""
    at = slot(pairs.keys, key)
    if pairs.keys[at] == FREE:
        pairs.keys[at], pairs.counts[at], pairs.seen[at], pairs.entry[at] = key, 0, -1, -1
        state[PAIRED] += 1
        if state[PAIRED] > 3 * len(pairs.keys) // 4:
            state[FULL] = 1
    return at


@Function
def count_pairs(pieces: PieceList, first: int, pairs: PairTable, state: I64s) -> Int:
    """Count the pairs from a piece on until the table is full; the piece to go on with."""
    for piece in range(first, len(pieces.sizes)):
        if state[FULL]:
            return piece
        start = pieces.starts[piece]
        for at in range(start + 1, start + pieces.sizes[piece]):
            pairs.counts[found(pairs, state, pair_key(pieces.symbols[at - 1], pieces.symbols[at]))] += (
                pieces.counts[piece]
            )
    return np.int64(len(pieces.sizes))


@Function
def begin(pieces: PieceList, pairs: PairTable, queue: PairHeap, state: I64s) -> None:
    """Make an entry of each pair, with its pieces, and the heap."""
    entries = np.int64(0)
    for at in range(len(pairs.keys)):
        if pairs.keys[at] != FREE:
            pairs.seen[at], pairs.entry[at] = -1, entries
            queue.pairs[entries], queue.counts[entries], queue.starts[entries] = at, pairs.counts[at], 0
            entries += 1
    for piece in range(len(pieces.sizes)):
        _list(pieces, piece, pairs, queue, False)
    total = np.int64(0)
    for entry in range(entries):
        total += queue.starts[entry]
        queue.starts[entry] = total
        pairs.seen[queue.pairs[entry]] = -1
    queue.starts[entries] = total
    for piece in range(len(pieces.sizes)):
        _list(pieces, piece, pairs, queue, True)
    for entry in range(entries):
        push(queue, pairs, entry, entry)
    state[ENTRIES], state[HEAP], state[LISTED] = entries, entries, total


@inline
def _list(pieces, piece, pairs, queue, noted):
    """Count the piece for each of its pairs, or note it from the end of theirs on."""
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
def enter(keys: I64s, counts: I32s, pairs: PairTable, state: I64s) -> None:
    for i in range(len(keys)):
        pairs.counts[found(pairs, state, keys[i])] = counts[i]


# ---- learning --------------------------------------------------------------------

LEAST = 2  # how often a pair comes that is merged
PAIRS = 1 << 20  # places in their table
LISTED_MOST = 10_000_000
EFFORT = 1 << 24  # symbols that are looked at before Python has its turn


@Function
def learn(
    pieces: PieceList,
    pairs: PairTable,
    queue: PairHeap,
    tokens: TextTable,
    state: I64s,
    made: I64Rows,
    most: int,
) -> Int:
    """Merge the first pairs of the heap, and say which; how many it were."""
    count, effort = np.int64(0), np.int64(0)
    while (
        count < len(made)
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
        if queue.counts[entry] < LEAST:
            state[HEAP] = 0
            break
        state[HEAP] -= 1
        sink(queue, pairs, state[HEAP], queue.heap[state[HEAP]])
        left, right = pairs.keys[at] >> 32, pairs.keys[at] & 0xFFFFFFFF
        made[count, 0], made[count, 1] = left, right
        count += 1
        effort += _merge(pieces, pairs, queue, state, entry, left, right, _token(tokens, state, left, right))
    return count


@inline
def _token(tokens, state, left, right):
    """The number of what two tokens make, which other two may have made before."""
    start = end = tokens.ends[state[TOKENS]]
    for part in (left, right):
        for at in range(tokens.ends[part], tokens.ends[part + 1]):
            tokens.text[end] = tokens.text[at]
            end += 1
    at = find(tokens, tokens.text, start, end)
    if not tokens.slots[at]:
        state[TOKENS] += 1
        tokens.ends[state[TOKENS]], tokens.slots[at] = end, state[TOKENS]
    return np.int64(tokens.slots[at] - 1)


@inline
def _merge(pieces, pairs, queue, state, entry, left, right, made):
    """Merge a pair in an entry's pieces, and make entries of the pairs that come up; how many symbols were looked at."""
    effort, first, notes = np.int64(1), state[ENTRIES], np.int64(len(queue.listed))
    for i in range(queue.starts[entry], queue.starts[entry + 1]):
        piece = queue.listed[i]
        effort += pieces.sizes[piece]
        notes = _merge_piece(pieces, piece, pairs, queue, state, left, right, made, first, notes)
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
def _merge_piece(pieces, piece, pairs, queue, state, left, right, made, first, notes):
    start, size, count = pieces.starts[piece], pieces.sizes[piece], pieces.counts[piece]
    row, kept, at = pieces.symbols[start:], np.int64(0), np.int64(0)
    while at < size:
        if row[at] == left and at + 1 < size and row[at + 1] == right:
            if kept:
                _less(pairs, row[kept - 1], left, count)
                notes = _more(pairs, queue, state, row[kept - 1], made, count, piece, first, notes)
            if at + 2 < size:
                _less(pairs, right, row[at + 2], count)
                notes = _more(pairs, queue, state, made, row[at + 2], count, piece, first, notes)
            row[kept] = made
            at += 2
        else:
            row[kept] = row[at]
            at += 1
        kept += 1
    pieces.sizes[piece] = kept
    return notes


@inline
def _less(pairs, left, right, count):
    at = slot(pairs.keys, pair_key(left, right))
    if pairs.keys[at] != FREE:
        pairs.counts[at] -= count


@inline
def _more(pairs, queue, state, left, right, count, piece, first, notes):
    """Count a pair that came up, and note the piece for its entry, from the end of all that is listed down; how far down."""
    if state[FULL]:
        return notes
    at = found(pairs, state, pair_key(left, right))
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
    # Room for one more note, and for all those of now where they are to be listed
    if state[LISTED] + (len(queue.listed) - notes) // 2 + 3 > notes or state[ENTRIES] == len(queue.pairs):
        state[FULL] = 1
    return notes


# ---- all of it -------------------------------------------------------------


class BpeTrainer:
    """Learns from pieces; its first tokens are the bytes, in the order given."""

    def __init__(self, known: TextTable, counts: np.ndarray, letters: bytes, most: int) -> None:
        precompile((count_pairs, begin, learn))
        bounds, order = known.ends[: len(counts) + 1].copy(), np.frombuffer(letters, np.uint8)
        symbols = np.argsort(order).astype(np.int32)[known.text[: bounds[-1]]]
        self.pieces = PieceList(symbols, bounds[:-1], np.diff(bounds), counts.copy())
        places = min(PAIRS, 1 << (4 * len(symbols) + 1000).bit_length())
        self.pairs = PairTable(np.empty(places, np.int64), *(np.empty(places, np.int32) for _ in range(3)))
        lengths = places, places, places + 1, places, min(5 * len(symbols) + 1000, LISTED_MOST)
        self.queue = PairHeap(*(np.empty(length, np.int32) for length in lengths))
        self.tokens, self.state = room_for(most, (most + 1) * LONGEST), np.zeros(6, np.int64)
        self.tokens.text[:256], self.tokens.ends[:257] = order, np.arange(257)
        self.most, self.state[TOKENS] = most, 256

    def __iter__(self) -> Iterator[np.ndarray]:
        """The pairs that are merged, some at a time."""
        made = np.empty((1024, 2), np.int64)
        left_out, merged = self._count_all(), len(made)
        while self.state[TOKENS] < self.most and merged >= len(made):
            begin(self.pieces, self.pairs, self.queue, self.state)
            merged = 0
            while self.state[TOKENS] < self.most and self.state[HEAP] and not self.state[FULL]:
                count = learn(self.pieces, self.pairs, self.queue, self.tokens, self.state, made, self.most)
                yield made[:count]
                merged += count
            if self.state[FULL]:
                merged = len(made)
            elif not left_out:
                return
            left_out = self._count_all() | self._thin(LEAST, len(self.pairs.keys) // 4)

    @property
    def learned(self) -> int:
        return int(self.state[TOKENS]) - 256

    def texts(self) -> Iterator[bytes]:
        """Of all tokens."""
        ends = self.tokens.ends[: self.state[TOKENS] + 1].tolist()
        return (self.tokens.text[start:end].tobytes() for start, end in pairwise(ends))

    def _count_all(self) -> bool:
        """Count all pairs of what the pieces have become; whether any that come often enough were left out."""
        self._empty()
        done, left_out = 0, False
        while (done := count_pairs(self.pieces, done, self.pairs, self.state)) < len(self.pieces.sizes):
            self._thin(1, len(self.pairs.keys) // 2)
            left_out = True
        return left_out

    def _empty(self) -> None:
        self.pairs.keys[:] = FREE
        self.state[PAIRED] = self.state[FULL] = 0

    def _thin(self, least: int, room: int) -> bool:
        """Leave out the rarest pairs, so that no more are left than there is room for; whether any goes that could be merged."""
        there, counts = self.pairs.keys != FREE, self.pairs.counts
        while np.count_nonzero(there & (counts >= least)) > room:
            least *= 2
        there &= counts >= least
        keys, counts = self.pairs.keys[there], self.pairs.counts[there]
        self._empty()
        enter(keys, counts, self.pairs, self.state)
        return least > LEAST
