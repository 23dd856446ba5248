"""The cheapest recomputation that fits a given memory."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from llamatrain.graph.remat_policy import Policy


class HasTotal(Protocol):
    @property
    def total(self) -> int: ...


P = TypeVar("P", bound=HasTotal)


def find_cheapest(
    plan_with: Callable[[Policy], P], ladder: Sequence[Policy], probes: Sequence[int], memory: int
) -> P | None:
    """Of policies each of which costs more than the one before, and mostly takes less memory, the first that takes no more than
    `memory`, if any does.

    It is found by halving, behind the last of the places marked where too much is taken. At these it is looked in any case.
    """
    too_low = -1
    for enough in probes:
        best = plan_with(ladder[enough])
        if best.total > memory:
            too_low = enough
            continue
        while enough - too_low > 1:
            middle = (too_low + enough) // 2
            candidate = plan_with(ladder[middle])
            if candidate.total <= memory:
                enough, best = middle, candidate
            else:
                too_low = middle
        return best
    return None
