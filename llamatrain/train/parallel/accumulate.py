"""The order in which a rank adds up the gradients of its groups, with as few vectors as possible.

Gradients are computed into vector 0. The sum of a tree node that waits for its sibling is in another vector;
a group with one micro-batch is added directly to the previous group if that is its sibling.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from llamatrain.train.parallel.partition import TreeNode, rank_range


@dataclass
class GroupStep:
    """A group of micro-batches, and the additions after its last one."""

    batches: int
    accumulates: bool  # adds to vector 0 instead of overwriting it
    # (target, source): the source is added to the target, and is free afterwards
    additions: list[tuple[int, int]] = field(default_factory=list)
    move_to: int = 0  # vector 0 is copied here before the next group overwrites it; 0: it is not


@dataclass(frozen=True)
class AccumulationPlan:
    """The steps of a rank's groups; `sums` lists the remaining tree nodes and their vectors."""

    groups: list[GroupStep]
    sums: list[tuple[TreeNode, int]]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(group.batches for group in self.groups))

    @property
    def count(self) -> int:
        """The number of micro-batches."""
        return self._ends[-1]

    @property
    def vector_count(self) -> int:
        """The number of vectors that the plan needs."""
        return 1 + max(max((group.move_to, *(to for to, _ in group.additions))) for group in self.groups)

    def starts_sum(self, index: int) -> bool:
        """Return True if this micro-batch starts a sum in vector 0."""
        group = bisect_right(self._ends, index)
        return index == self._ends[group] - self.groups[group].batches and not self.groups[group].accumulates

    def ending_group(self, index: int) -> GroupStep | None:
        """Return the group that ends with this micro-batch, or None."""
        group = bisect_right(self._ends, index)
        return self.groups[group] if index == self._ends[group] - 1 else None


def plan_accumulation(groups: range, count: int, batches: int) -> AccumulationPlan:
    """Plan the accumulation of some of `count` groups, for a step of `batches` micro-batches."""
    steps, waiting, free = list[GroupStep](), list[tuple[TreeNode, int]](), list[int]()
    vectors = 1
    for group in groups:
        node, vector = TreeNode(group, 1), 0
        accumulates = bool(waiting) and waiting[-1][1] == 0  # its sibling is still in vector 0
        steps.append(GroupStep(len(rank_range(batches, count, group)), accumulates))
        if accumulates:
            node = waiting.pop()[0].parent()
        while waiting and waiting[-1][0].is_left_sibling_of(node):
            left, to = waiting.pop()
            steps[-1].additions.append((to, vector))
            free += [vector] if vector else []
            node, vector = left.parent(), to
        follows = group + 1 in groups
        if (
            vector == 0
            and follows
            and not (TreeNode(group, 1).is_left and len(rank_range(batches, count, group + 1)) == 1)
        ):
            vector = free.pop() if free else vectors
            vectors = max(vectors, vector + 1)
            steps[-1].move_to = vector
        waiting.append((node, vector))
    return AccumulationPlan(steps, waiting)
