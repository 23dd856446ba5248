"""Assigns arena offsets to memory blocks with known lifetimes, so that no two live blocks overlap.

If a device limits the size of an allocation, there are several arenas. They lie end to end in one address
range, each as large as possible, and no block crosses from one to the next.

The allocator asks which addresses are taken during a span of time. Lifetimes are kept as in a segment tree: a
span is covered by a few nodes, each half as long as its parent. A node knows the addresses that are taken
throughout its time, and those taken at any moment of it, as sorted bounds of disjoint intervals. Memory is
packed tightly, so these are few even in a long graph.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from llamatrain.platform.memory import ALIGNMENT

UNLIMITED = 1 << 62
Bounds = list[int]  # sorted starts and ends of intervals


def align(size: int) -> int:
    """Round a size up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass
class Allocation:
    """A block of memory with its first and last use; values that reuse each other's memory share one."""

    size: int
    first: int
    last: int


def assign_offsets(blocks: Sequence[Allocation], max_arena: int = UNLIMITED) -> tuple[list[int], list[int]]:
    """Return an offset for each block and the sizes of the arenas.

    Blocks that are live when most memory is live come first, the largest of them first. The memory live at
    that moment is a lower bound, and nearly always sufficient. If it is not, placing the largest blocks first
    is tried as well.
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
    """Return the bytes that are live at each time."""
    changes = np.zeros(2 + max((block.last for block in blocks), default=0), np.int64)
    for block in blocks:
        changes[block.first] += align(block.size)
        changes[block.last + 1] -= align(block.size)
    return np.cumsum(changes)


def place_in_order(
    blocks: Sequence[Allocation], order: Sequence[int], max_arena: int
) -> tuple[list[int], list[int]]:
    """Place blocks in the given order, each into the smallest gap among blocks that live at the same time.

    No block crosses a multiple of `max_arena`, where one arena ends and the next begins.
    """
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
    """Return the offset of the smallest sufficient gap, the first of equal ones, or the end of all intervals."""
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
    """Return the offset, or the start of the next arena if the block would cross into it."""
    return offset if offset % max_arena + size <= max_arena else offset - offset % max_arena + max_arena


class LiveIntervals:
    """The address intervals that are taken, by time."""

    def __init__(self, times: int) -> None:
        self.leaves = 1 << (times - 1).bit_length()
        # by node: the root is 1, below n are 2n and 2n + 1
        self.throughout: defaultdict[int, Bounds] = defaultdict(list)
        self.at_any_time: defaultdict[int, Bounds] = defaultdict(list)

    def overlapping(self, block: Allocation) -> list[tuple[int, int]]:
        """Return the sorted intervals that are taken at some time of a block's life; some occur twice."""
        bounds_lists = [
            self.at_any_time[node] for node in self._covering_nodes(block) if node in self.at_any_time
        ]
        above = {end >> level for end in self._leaf_range(block) for level in range(self.leaves.bit_length())}
        bounds_lists += [self.throughout[node] for node in above if node in self.throughout]
        return sorted(pair for bounds in bounds_lists for pair in zip(bounds[::2], bounds[1::2], strict=True))

    def insert(self, block: Allocation, start: int, end: int) -> None:
        """Mark an interval as taken during a block's life."""
        for node in self._covering_nodes(block):
            merge_interval(self.throughout[node], start, end)
            # what a node contains, its parents contain
            while node and merge_interval(self.at_any_time[node], start, end):
                node >>= 1

    def _leaf_range(self, block: Allocation) -> tuple[int, int]:
        return self.leaves + block.first, self.leaves + block.last

    def _covering_nodes(self, block: Allocation) -> Iterator[int]:
        """Yield the tree nodes that cover a block's life."""
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
    """Merge an interval into sorted bounds. Return False if it was contained already."""
    low, high = bisect_left(bounds, start), bisect_right(bounds, end)
    new = ([] if low & 1 else [start]) + ([] if high & 1 else [end])
    if bounds[low:high] == new:
        return False
    bounds[low:high] = new
    return True
