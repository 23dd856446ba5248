"""Pairs of neighbours with how often they come, the pieces to look for them in, and which comes most often: compiled."""

from typing import NamedTuple

import numpy as np

from llamatrain.compiler.declare import Function, I32s, I64s, Int, inline
from llamatrain.data.tokenizer.hash_tables import FREE, slot

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
