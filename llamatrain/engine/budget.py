"""The cheapest recomputation that fits a given memory."""

from collections.abc import Callable
from typing import Protocol, TypeVar

Policy = str | int


class Planned(Protocol):
    @property
    def total(self) -> int: ...


P = TypeVar("P", bound=Planned)


def cheapest(plan_with: Callable[[Policy], P], blocks: int, memory: int) -> tuple[Policy, P]:
    """Of the policies light and the first 1 to all `blocks` made again, the first that takes no more than `memory`.

    Light costs a hundredth of the time, so it is taken wherever nothing else was asked for. Each of the others costs more time
    than the one before and less memory, so the number of blocks is found by halving. Where even the last takes more, it is
    given all the same.
    """
    made = plan_with("light")
    if made.total <= memory:
        return "light", made
    best = plan_with(blocks)
    if best.total > memory:
        return blocks, best
    too_few, enough = 0, blocks
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        made = plan_with(middle)
        if made.total <= memory:
            enough, best = middle, made
        else:
            too_few = middle
    return enough, best
