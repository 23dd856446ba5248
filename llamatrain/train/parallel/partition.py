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

from llamatrain.optim.optimizer import slice_key

BUCKET = 1 << 23  # elements: 32 MB
LINE = 16  # elements of a cache line: segments end there


def rank_range(count: int, ranks: int, rank: int) -> range:
    """Return the range of `count` items that belongs to a rank."""
    return range(count * rank // ranks, count * (rank + 1) // ranks)


class TreeNode(NamedTuple):
    """A node of the binary tree over groups: `size` groups from `start` on."""

    start: int
    size: int

    @property
    def is_left(self) -> bool:
        """True if it is the left child of its parent."""
        return self.start % (2 * self.size) == 0

    def is_left_sibling_of(self, other: "TreeNode") -> bool:
        """Return True if `other` is its right sibling."""
        return self.is_left and self.size == other.size and self.start + self.size == other.start

    def parent(self) -> "TreeNode":
        """Return the parent of this left child."""
        return TreeNode(self.start, 2 * self.size)


def cover_with_nodes(groups: range) -> list[TreeNode]:
    """Return the fewest tree nodes that cover these groups."""
    nodes = list[TreeNode]()
    for group in groups:
        node = TreeNode(group, 1)
        while nodes and nodes[-1].is_left_sibling_of(node):
            node = nodes.pop().parent()
        nodes.append(node)
    return nodes


class ParamSlice(NamedTuple):
    """A slice of one weight, in positions of the flat vector."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]  # as many axes as the weight
    key: str  # name of the slice


Segment = list[ParamSlice]


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Assigns slices of the flat gradient vector to buckets, segments and ranks.

    `order` lists weights in the order in which their gradients become final. With `whole_weights`, no
    weight is split, as some optimizers require.
    """

    shapes: Mapping[str, tuple[int, ...]]
    order: Sequence[str]
    groups: int
    ranks: int = 1
    rank: int = 0
    whole_weights: bool = False

    @cached_property
    def offsets(self) -> dict[str, int]:
        """The offset of each weight in the flat vector."""
        sizes = accumulate((prod(shape) for shape in self.shapes.values()), initial=0)
        return dict(zip(self.shapes, sizes, strict=False))

    @cached_property
    def buckets(self) -> list[list[Segment]]:
        """The buckets in the order in which they become final, each a list of segments."""
        bucket_slices, space = [list[ParamSlice]()], BUCKET
        for name in self.order:
            start, stop = self.offsets[name], self.offsets[name] + prod(self.shapes[name])
            while start < stop:
                end = stop if self.whole_weights else min(stop, start + space)
                bucket_slices[-1].append(self._slice(name, start, end))
                space, start = space - (end - start), end
                if space <= 0:
                    bucket_slices.append([])
                    space = BUCKET
        return [
            self._segments(sorted(slices, key=lambda cut: cut.start)) for slices in bucket_slices if slices
        ]

    def _slice(self, name: str, start: int, stop: int) -> ParamSlice:
        shape = self.shapes[name]
        whole = stop - start == prod(shape)
        slice_shape = shape if whole else (*(1 for _ in shape[1:]), stop - start)
        return ParamSlice(name, start, stop, slice_shape, slice_key(name, start))

    def _segments(self, slices: list[ParamSlice]) -> list[Segment]:
        size = sum(part.stop - part.start for part in slices)
        segments = [Segment() for _ in range(self.groups)]
        borders = [size * s // self.groups // LINE * LINE for s in range(self.groups)] + [size]
        offset = 0
        for part in slices:
            end = offset + part.stop - part.start
            if self.whole_weights:
                segments[self._weight_segments[part.name]].append(part)
            else:
                for segment, (low, high) in zip(segments, pairwise(borders), strict=True):
                    if (first := max(offset, low)) < (last := min(end, high)):
                        segment.append(
                            self._slice(part.name, part.start + first - offset, part.start + last - offset)
                        )
            offset = end
        return segments

    @cached_property
    def _weight_segments(self) -> dict[str, int]:
        """The segment of each unsplit weight: greedy, largest first, to the least loaded."""
        loads, segments = [0] * self.groups, dict[str, int]()
        for name in sorted(self.shapes, key=lambda name: -prod(self.shapes[name])):
            segments[name] = loads.index(min(loads))
            loads[segments[name]] += prod(self.shapes[name])
        return segments

    def bucket_slices(self, bucket: int, rank: int) -> list[ParamSlice]:
        """Return the slices of a bucket that belong to a rank."""
        return [
            part
            for segment in rank_range(self.groups, self.ranks, rank)
            for part in self.buckets[bucket][segment]
        ]

    def bucket_ranges(self, bucket: int, rank: int) -> list[slice]:
        """Return the same as contiguous ranges of the flat vector."""
        return merge_ranges(self.bucket_slices(bucket, rank))

    def rank_slices(self, rank: int) -> list[ParamSlice]:
        """Return all slices of a rank."""
        return [part for bucket in range(len(self.buckets)) for part in self.bucket_slices(bucket, rank)]

    @cached_property
    def rank_nodes(self) -> list[list[TreeNode]]:
        """The tree nodes of each rank's groups."""
        return [cover_with_nodes(rank_range(self.groups, self.ranks, rank)) for rank in range(self.ranks)]

    def receive_size(self, rank: int) -> int:
        """Return the elements that a rank receives for the largest bucket.

        These are all nodes of others in its segments.
        """
        others = sum(len(nodes) for other, nodes in enumerate(self.rank_nodes) if other != rank)
        sizes = (
            sum(run.stop - run.start for run in self.bucket_ranges(bucket, rank))
            for bucket in range(len(self.buckets))
        )
        return others * max(sizes)


def merge_ranges(slices: Iterable[ParamSlice]) -> list[slice]:
    """Merge adjacent slices into contiguous ranges."""
    ranges = list[slice]()
    for part in sorted(slices, key=lambda cut: cut.start):
        if ranges and ranges[-1].stop == part.start:
            ranges[-1] = slice(ranges[-1].start, part.stop)
        else:
            ranges.append(slice(part.start, part.stop))
    return ranges
