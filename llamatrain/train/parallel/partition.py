"""The partition of a step: micro-batches into groups, the gradient into buckets of segments, both among ranks.

The numbers of groups and segments do not depend on the number of ranks, and they alone determine the order of
additions: so a step gives the same bits for any number of ranks. A group's gradient is the sum of its micro-
batches in order; groups are added in a binary tree, of which each rank has the sums of some whole subtrees. A
segment is what one rank reduces and holds the moments of; a bucket can be reduced as soon as its part of the
gradient is final.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

BUCKET = 1 << 23  # elements: 32 MB
LINE = 16  # elements of a cache line: where segments are cut


def share(count: int, ranks: int, rank: int) -> range:
    """Return the range of `count` items that belongs to a rank."""
    return range(count * rank // ranks, count * (rank + 1) // ranks)


class TreeNode(NamedTuple):
    """A node of the binary tree over groups: `size` groups from `start` on."""

    start: int
    size: int

    @property
    def left(self) -> bool:
        """True if it is the left child of its parent."""
        return self.start % (2 * self.size) == 0

    def joins(self, other: "TreeNode") -> bool:
        """Return True if `other` is its right sibling."""
        return self.left and self.size == other.size and self.start + self.size == other.start

    def joined(self) -> "TreeNode":
        """Return the parent of this left child."""
        return TreeNode(self.start, 2 * self.size)


def branches(groups: range) -> list[TreeNode]:
    """Return the fewest tree nodes that cover these groups."""
    found = list[TreeNode]()
    for group in groups:
        branch = TreeNode(group, 1)
        while found and found[-1].joins(branch):
            branch = found.pop().joined()
        found.append(branch)
    return found


class ParamSlice(NamedTuple):
    """A slice of one weight, in positions of the flat vector."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]  # with as many axes as the weight has
    key: str  # what it is called


Segment = list[ParamSlice]


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Assigns slices of the flat gradient vector to buckets, segments and ranks.

    `order` lists weights in the order in which their gradients become final. With `whole`, no weight is
    split, as some optimizers require.
    """

    shapes: Mapping[str, tuple[int, ...]]
    order: Sequence[str]
    groups: int
    ranks: int = 1
    rank: int = 0
    whole: bool = False

    @cached_property
    def begins(self) -> dict[str, int]:
        """The offset of each weight in the flat vector."""
        sizes = accumulate((prod(shape) for shape in self.shapes.values()), initial=0)
        return dict(zip(self.shapes, sizes, strict=False))

    @cached_property
    def buckets(self) -> list[list[Segment]]:
        """The buckets in the order in which they become final, each a list of segments."""
        filled, room = [list[ParamSlice]()], BUCKET
        for name in self.order:
            start, stop = self.begins[name], self.begins[name] + prod(self.shapes[name])
            while start < stop:
                end = stop if self.whole else min(stop, start + room)
                filled[-1].append(self._cut(name, start, end))
                room, start = room - (end - start), end
                if room <= 0:
                    filled.append([])
                    room = BUCKET
        return [self._segments(sorted(cuts, key=lambda cut: cut.start)) for cuts in filled if cuts]

    def _cut(self, name: str, start: int, stop: int) -> ParamSlice:
        shape = self.shapes[name]
        whole = stop - start == prod(shape)
        parted = shape if whole else (*(1 for _ in shape[1:]), stop - start)
        return ParamSlice(name, start, stop, parted, f"{name}@{start}")

    def _segments(self, cuts: list[ParamSlice]) -> list[Segment]:
        size, made = sum(cut.stop - cut.start for cut in cuts), [Segment() for _ in range(self.groups)]
        borders = [size * s // self.groups // LINE * LINE for s in range(self.groups)] + [size]
        at = 0
        for cut in cuts:
            end = at + cut.stop - cut.start
            if self.whole:
                made[self._places[cut.name]].append(cut)
            else:
                for segment, (low, high) in zip(made, pairwise(borders), strict=True):
                    if (first := max(at, low)) < (last := min(end, high)):
                        segment.append(self._cut(cut.name, cut.start + first - at, cut.start + last - at))
            at = end
        return made

    @cached_property
    def _places(self) -> dict[str, int]:
        """The segment of each unsplit weight: greedy, largest first, to the least loaded."""
        loads, found = [0] * self.groups, dict[str, int]()
        for name in sorted(self.shapes, key=lambda name: -prod(self.shapes[name])):
            found[name] = loads.index(min(loads))
            loads[found[name]] += prod(self.shapes[name])
        return found

    def cuts(self, bucket: int, rank: int) -> list[ParamSlice]:
        """Return the slices of a bucket that belong to a rank."""
        return [
            cut for number in share(self.groups, self.ranks, rank) for cut in self.buckets[bucket][number]
        ]

    def runs(self, bucket: int, rank: int) -> list[slice]:
        """Return the same as contiguous ranges of the flat vector."""
        return joined(self.cuts(bucket, rank))

    def cuts_of(self, rank: int) -> list[ParamSlice]:
        """Return all slices of a rank."""
        return [cut for bucket in range(len(self.buckets)) for cut in self.cuts(bucket, rank)]

    @cached_property
    def branches(self) -> list[list[TreeNode]]:
        """The tree nodes of each rank's groups."""
        return [branches(share(self.groups, self.ranks, rank)) for rank in range(self.ranks)]

    def room(self, rank: int) -> int:
        """Return the elements that a rank receives for the largest bucket: all nodes of others in its
        segments.
        """
        others = sum(len(theirs) for each, theirs in enumerate(self.branches) if each != rank)
        own = (
            sum(run.stop - run.start for run in self.runs(number, rank))
            for number in range(len(self.buckets))
        )
        return others * max(own)


def joined(cuts: Iterable[ParamSlice]) -> list[slice]:
    """Merge adjacent slices into contiguous ranges."""
    found = list[slice]()
    for cut in sorted(cuts, key=lambda cut: cut.start):
        if found and found[-1].stop == cut.start:
            found[-1] = slice(found[-1].start, cut.stop)
        else:
            found.append(slice(cut.start, cut.stop))
    return found
