"""Places in an arena for memory whose lives are known: none lies over another that lives at the same time.

An arena may have to be made of several, none larger than so many bytes, where nobody can give one that large: they are laid end
to end in one row of addresses, each as long as may be, and what is placed lies in one of them.

Asked for is what is taken in some span of time. Lives are kept as segment trees keep them: a span is made of a few nodes, each
half of the one above. A node knows the addresses that are taken during the whole of its time, and those at any moment of it,
as bounds of intervals that do not touch; memory is packed tightly, so these are few, however long the graph is.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from llamatrain.platform.memory import ALIGNMENT

UNLIMITED = 1 << 62
Bounds = list[int]  # of intervals in their order: where each begins and ends


def align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass
class Allocation:
    """Memory that is one from the making of a value to the last reading of the last value that takes it over; or scratch."""

    size: int
    first: int
    last: int


def assign_offsets(blocks: Sequence[Allocation], max_arena: int = UNLIMITED) -> tuple[list[int], list[int]]:
    """An offset for each block, none over another that lives at the same time, and the sizes of the arenas.

    Those go first that are there when most is, the largest of them before others: what that moment takes is the least that can
    be, and nearly always enough. Where it is not, largest first is tried, too.
    """
    loads = memory_profile(blocks)
    peak_loads = [int(loads[block.first : block.last + 1].max()) for block in blocks]
    by_load = sorted(
        range(len(blocks)),
        key=lambda number: (-peak_loads[number], -blocks[number].size, blocks[number].first),
    )
    placement = place_in_order(blocks, by_load, max_arena)
    if sum(placement[1]) > max(peak_loads, default=0):
        by_size = sorted(by_load, key=lambda number: (-blocks[number].size, blocks[number].first))
        placement = min(placement, place_in_order(blocks, by_size, max_arena), key=lambda each: sum(each[1]))
    return placement


def memory_profile(blocks: Sequence[Allocation]) -> np.ndarray:
    """How much is there, at each time."""
    changes = np.zeros(2 + max((block.last for block in blocks), default=0), np.int64)
    for block in blocks:
        changes[block.first] += align(block.size)
        changes[block.last + 1] -= align(block.size)
    return np.cumsum(changes)


def place_in_order(
    blocks: Sequence[Allocation], order: Sequence[int], max_arena: int
) -> tuple[list[int], list[int]]:
    """Each into the smallest gap that holds it between those that are there in its life. None lies across a multiple of `most`,
    where one arena ends and the next begins; none is larger."""
    offsets, arenas = [0] * len(blocks), [0]
    taken = LiveIntervals(1 + max((block.last for block in blocks), default=0))
    for number in order:
        block, size = blocks[number], align(blocks[number].size)
        if not size:
            continue
        offsets[number] = offset = best_fit(taken.overlapping(block), size, max_arena)
        taken.insert(block, offset, offset + size)
        number, start = divmod(offset, max_arena)
        arenas += [0] * (number + 1 - len(arenas))
        arenas[number] = max(arenas[number], start + size)
    return offsets, arenas


def best_fit(intervals: Sequence[tuple[int, int]], size: int, max_arena: int = UNLIMITED) -> int:
    """A place in the smallest gap that holds so much, the first of such; else behind all."""
    best_gap, best_offset, top = 0, -1, 0
    for start, end in intervals:
        if size <= start - top and (best_offset < 0 or start - top < best_gap):
            offset = fit_in_arena(top, size, max_arena)
            if offset + size <= start:
                best_gap, best_offset = start - top, offset
        if end > top:
            top = end
    return fit_in_arena(top, size, max_arena) if best_offset < 0 else best_offset


def fit_in_arena(offset: int, size: int, max_arena: int) -> int:
    """The place, or the begin of the next arena, where this one ends too soon."""
    return offset if offset % max_arena + size <= max_arena else offset - offset % max_arena + max_arena


class LiveIntervals:
    """Addresses, by the times when they are taken."""

    def __init__(self, times: int) -> None:
        self.leaves = 1 << (times - 1).bit_length()
        self.throughout: defaultdict[int, Bounds] = defaultdict(
            list
        )  # by node: the root is 1, below n are 2n and 2n + 1
        self.at_any_time: defaultdict[int, Bounds] = defaultdict(list)

    def overlapping(self, block: Allocation) -> list[tuple[int, int]]:
        """What is taken at some time of a block's life, in order; some of it told twice."""
        bounds_lists = [
            self.at_any_time[node] for node in self._covering_nodes(block) if node in self.at_any_time
        ]
        above = {end >> level for end in self._leaf_range(block) for level in range(self.leaves.bit_length())}
        bounds_lists += [self.throughout[node] for node in above if node in self.throughout]
        return sorted(pair for bounds in bounds_lists for pair in zip(bounds[::2], bounds[1::2], strict=True))

    def insert(self, block: Allocation, start: int, end: int) -> None:
        for node in self._covering_nodes(block):
            merge_interval(self.throughout[node], start, end)
            while node and merge_interval(
                self.at_any_time[node], start, end
            ):  # what is there already is there above, too
                node >>= 1

    def _leaf_range(self, block: Allocation) -> tuple[int, int]:
        return self.leaves + block.first, self.leaves + block.last

    def _covering_nodes(self, block: Allocation) -> Iterator[int]:
        """The nodes that a life is made of."""
        low, high = self._leaf_range(block)
        high += 1
        while low < high:
            if low & 1:
                yield low
                low += 1
            if high & 1:
                high -= 1
                yield high
            low, high = low >> 1, high >> 1


def merge_interval(bounds: Bounds, start: int, end: int) -> bool:
    """Unite an interval with some; whether that changed them."""
    low, high = bisect_left(bounds, start), bisect_right(bounds, end)
    new = ([] if low & 1 else [start]) + ([] if high & 1 else [end])
    if bounds[low:high] == new:
        return False
    bounds[low:high] = new
    return True
