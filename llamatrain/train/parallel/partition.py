"""How a step is divided: its micro-batches into groups, its gradient into buckets of segments, and both among ranks.

Groups and segments are as many, whatever the number of ranks, and what is added to what follows from them alone: so a step has
the same bits for any number of ranks. A group's gradient is the sum of its micro-batches in order; groups are added in a binary
tree, in which a rank has the sums of some whole branches. A segment is what one rank adds up, and holds the moments of; with
buckets it can do so for a part of the gradient as soon as this part is there.
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
    """Of so many in a row: those of a rank."""
    return range(count * rank // ranks, count * (rank + 1) // ranks)


class TreeNode(NamedTuple):
    """Of the tree over groups: those from `start` on."""

    start: int
    size: int

    @property
    def left(self) -> bool:
        """Whether it is the earlier half of what it is a half of."""
        return self.start % (2 * self.size) == 0

    def joins(self, other: "TreeNode") -> bool:
        """Whether the other one is its later half."""
        return self.left and self.size == other.size and self.start + self.size == other.start

    def joined(self) -> "TreeNode":
        return TreeNode(self.start, 2 * self.size)


def branches(groups: range) -> list[TreeNode]:
    """The fewest that these groups are."""
    found = list[TreeNode]()
    for group in groups:
        branch = TreeNode(group, 1)
        while found and found[-1].joins(branch):
            branch = found.pop().joined()
        found.append(branch)
    return found


class ParamSlice(NamedTuple):
    """Of one weight: these places of the flat vector."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]  # with as many axes as the weight has
    key: str  # what it is called


Segment = list[ParamSlice]


@dataclass(frozen=True, kw_only=True)
class Partition:
    """`order`: weights as their gradients become final. Where the optimizer needs `whole` weights, none is cut."""

    shapes: Mapping[str, tuple[int, ...]]
    order: Sequence[str]
    groups: int
    ranks: int = 1
    rank: int = 0
    whole: bool = False

    @cached_property
    def begins(self) -> dict[str, int]:
        sizes = accumulate((prod(shape) for shape in self.shapes.values()), initial=0)
        return dict(zip(self.shapes, sizes, strict=False))

    @cached_property
    def buckets(self) -> list[list[Segment]]:
        """As they become final, each in its segments."""
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
        """The segments that whole weights are of, in all buckets: each of the largest that are left goes to the lightest."""
        loads, found = [0] * self.groups, dict[str, int]()
        for name in sorted(self.shapes, key=lambda name: -prod(self.shapes[name])):
            found[name] = loads.index(min(loads))
            loads[found[name]] += prod(self.shapes[name])
        return found

    def cuts(self, bucket: int, rank: int) -> list[ParamSlice]:
        """Of a rank's own segments."""
        return [
            cut for number in share(self.groups, self.ranks, rank) for cut in self.buckets[bucket][number]
        ]

    def runs(self, bucket: int, rank: int) -> list[slice]:
        """The same, as places of the flat vector that follow each other."""
        return joined(self.cuts(bucket, rank))

    def cuts_of(self, rank: int) -> list[ParamSlice]:
        return [cut for bucket in range(len(self.buckets)) for cut in self.cuts(bucket, rank)]

    @cached_property
    def branches(self) -> list[list[TreeNode]]:
        """Of each rank's groups."""
        return [branches(share(self.groups, self.ranks, rank)) for rank in range(self.ranks)]

    def room(self, rank: int) -> int:
        """Elements that come from others for a bucket, of the largest: all branches of theirs in the rank's segments."""
        others = sum(len(theirs) for each, theirs in enumerate(self.branches) if each != rank)
        own = (
            sum(run.stop - run.start for run in self.runs(number, rank))
            for number in range(len(self.buckets))
        )
        return others * max(own)


def joined(cuts: Iterable[ParamSlice]) -> list[slice]:
    found = list[slice]()
    for cut in sorted(cuts, key=lambda cut: cut.start):
        if found and found[-1].stop == cut.start:
            found[-1] = slice(found[-1].start, cut.stop)
        else:
            found.append(slice(cut.start, cut.stop))
    return found
