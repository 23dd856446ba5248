"""The cheapest recomputation that fits a given memory."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from llamatrain.graph.remat_policy import Policy


class Planned(Protocol):
    @property
    def total(self) -> int: ...


P = TypeVar("P", bound=Planned)


def cheapest(
    plan_with: Callable[[Policy], P], road: Sequence[Policy], marks: Sequence[int], memory: int
) -> P | None:
    """Of policies each of which costs more than the one before, and mostly takes less memory, the first that takes no more than
    `memory`, if any does.

    It is found by halving, behind the last of the places marked where too much is taken. At these it is looked in any case.
    """
    too_few = -1
    for enough in marks:
        best = plan_with(road[enough])
        if best.total > memory:
            too_few = enough
            continue
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            made = plan_with(road[middle])
            if made.total <= memory:
                enough, best = middle, made
            else:
                too_few = middle
        return best
    return None
