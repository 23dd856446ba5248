"""In which order a rank adds up its groups, with as few vectors as that takes.

Gradients are made in vector 0. The sum of a branch that waits for its other half lies in another one; a group of one micro-batch
is added to the group before it where that is its other half, without being anywhere else.
"""

from dataclasses import dataclass, field

from llamatrain.train.division import Branch, share


@dataclass
class Micro:
    """A micro-batch: whether it overwrites what is in vector 0, and what is done behind it."""

    first: bool
    added: list[tuple[int, int]] = field(default_factory=list)  # to a vector, another one, which is not needed any more
    moved: int = 0  # vector 0 makes way to this one


@dataclass(frozen=True)
class Turns:
    turns: list[Micro]
    sums: list[tuple[Branch, int]]  # what is there at the end, in which vectors

    @property
    def vectors(self) -> int:
        return 1 + max(max((turn.moved, *(to for to, _ in turn.added))) for turn in self.turns)


def turns_of(groups: range, count: int, batches: int) -> Turns:
    """Of some of `count` groups, where a step has so many micro-batches."""
    turns, waiting, free = list[Micro](), list[tuple[Branch, int]](), list[int]()
    most = 1
    for group in groups:
        branch, vector = Branch(group, 1), 0
        size = len(share(batches, count, group))
        onto = bool(waiting) and waiting[-1][1] == 0  # the other half is still there
        turns += [Micro(first=number == 0 and not onto) for number in range(size)]
        if onto:
            branch = waiting.pop()[0].joined()
        while waiting and waiting[-1][0].joins(branch):
            left, to = waiting.pop()
            turns[-1].added.append((to, vector))
            free += [vector] if vector else []
            branch, vector = left.joined(), to
        follows = group + 1 in groups
        if vector == 0 and follows and not (Branch(group, 1).left and len(share(batches, count, group + 1)) == 1):
            vector = free.pop() if free else most
            most = max(most, vector + 1)
            turns[-1].moved = vector
        waiting.append((branch, vector))
    return Turns(turns, waiting)
