"""The order in which a rank adds up the gradients of its groups, with as few vectors as possible.

Gradients are computed into vector 0. The sum of a tree node that waits for its sibling is in another vector;
a group with one micro-batch is added directly to the previous group if that is its sibling.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from llamatrain.train.parallel.partition import TreeNode, share


@dataclass
class GroupStep:
    """A group of micro-batches, and the additions after its last one."""

    batches: int
    onto: bool  # it is added to what is in vector 0
    added: list[tuple[int, int]] = field(
        default_factory=list
    )  # to a vector, another one, which is not needed any more
    moved: int = 0  # vector 0 makes way to this one


@dataclass(frozen=True)
class AccumulationPlan:
    """The steps of a rank's groups; `sums` lists the remaining tree nodes and their vectors."""

    turns: list[GroupStep]
    sums: list[tuple[TreeNode, int]]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(turn.batches for turn in self.turns))

    @property
    def count(self) -> int:
        """The number of micro-batches."""
        return self._ends[-1]

    @property
    def vectors(self) -> int:
        """The number of vectors that the plan needs."""
        return 1 + max(max((turn.moved, *(to for to, _ in turn.added))) for turn in self.turns)

    def overwrites(self, number: int) -> bool:
        """Return True if this micro-batch starts a sum in vector 0."""
        group = bisect_right(self._ends, number)
        return number == self._ends[group] - self.turns[group].batches and not self.turns[group].onto

    def after(self, number: int) -> GroupStep | None:
        """Return the group that ends with this micro-batch, or None."""
        group = bisect_right(self._ends, number)
        return self.turns[group] if number == self._ends[group] - 1 else None


def turns_of(groups: range, count: int, batches: int) -> AccumulationPlan:
    """Plan the accumulation of some of `count` groups, for a step of `batches` micro-batches."""
    turns, waiting, free = list[GroupStep](), list[tuple[TreeNode, int]](), list[int]()
    most = 1
    for group in groups:
        branch, vector = TreeNode(group, 1), 0
        onto = bool(waiting) and waiting[-1][1] == 0  # the other half is still there
        turns.append(GroupStep(len(share(batches, count, group)), onto))
        if onto:
            branch = waiting.pop()[0].joined()
        while waiting and waiting[-1][0].joins(branch):
            left, to = waiting.pop()
            turns[-1].added.append((to, vector))
            free += [vector] if vector else []
            branch, vector = left.joined(), to
        follows = group + 1 in groups
        if (
            vector == 0
            and follows
            and not (TreeNode(group, 1).left and len(share(batches, count, group + 1)) == 1)
        ):
            vector = free.pop() if free else most
            most = max(most, vector + 1)
            turns[-1].moved = vector
        waiting.append((branch, vector))
    return AccumulationPlan(turns, waiting)
