"""The cheapest recomputation whose plan fits a given memory."""

from collections.abc import Callable

from llamatrain.engine.plan import Plan, does_not_fit
from llamatrain.errors import MemoryPlanError

Policy = str | int


def cheapest(plan_with: Callable[[Policy], Plan], blocks: int, memory: int) -> tuple[Policy, Plan]:
    """Of the policies none, light, and the first 1 to all `blocks` made again, the first whose plan takes no more than `memory`.

    Each costs more time than the one before and less memory, so the number of blocks is found by halving.
    """
    policies: tuple[Policy, ...] = ("none", "light")
    for policy in policies:
        made = plan_with(policy)
        if made.total <= memory:
            return policy, made
    best = plan_with(blocks)
    if best.total > memory:
        raise MemoryPlanError(does_not_fit(best, memory, recomputed=True))
    too_few, enough = 0, blocks
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        made = plan_with(middle)
        if made.total <= memory:
            enough, best = middle, made
        else:
            too_few = middle
    return enough, best
