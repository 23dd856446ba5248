"""The road from keeping everything to keeping least: policies of recomputation, each dearer than the one before.

First the blocks are made again in the way that saves most for what it costs, one after the other from the first, whose values
live longest; then in the next way; at last the values between them in segments, the longest of which come first: while one is
at work, those behind it are done (each of c - j + 1 blocks as the j-th, where c values between blocks may live at a time).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from llamatrain.graph.remat_policy import POLICY_NAMES, SEGMENT, WAYS, Policy, PolicyPart, format_policy
from llamatrain.planner.cost import StepCost


@dataclass(frozen=True)
class RematLadder:
    policies: list[Policy]
    costs: list[float]  # of them, about
    marks: list[int]  # the ends of its stages

    def below(self, limit: float) -> "RematLadder":
        """As far as it is cheaper than that."""
        count = sum(1 for cost in self.costs if cost < limit)
        marks = sorted({*(mark for mark in self.marks if mark < count), *([count - 1] if count else [])})
        return RematLadder(self.policies[:count], self.costs[:count], marks)

    def after(self, count: int) -> "RematLadder":
        """Without the first ones."""
        return RematLadder(
            self.policies[count:], self.costs[count:], [mark - count for mark in self.marks if mark >= count]
        )


def road_of(prices: StepCost, units: int | None = None) -> RematLadder:
    """Where layers are counted in so many `units`, policies are of these, and there are no segments."""
    blocks = units or prices.layers - 1  # the last is never made again
    ways = worthwhile(prices) if blocks else []
    light = prices.cost("light")
    stages: list[tuple[list[Policy], float]] = [(["none"], prices.cost("none")), (["light"], light)]
    for last, way in zip(["light", *ways], ways, strict=False):
        end = light + (prices.layers - 1) * prices.cost_per_block(every(way, prices.layers), "light")
        stages.append(
            ([format_policy([(way, count), (last, blocks - count)]) for count in range(1, blocks + 1)], end)
        )
    if not units and (segments := list(longer(blocks))):
        again = (
            prices.cost_per_block(f"{SEGMENT}:{prices.layers}", "block")
            * (prices.sample_depth - 1)
            / max(1, prices.sample_depth - 2)
        )
        stages.append((segments, stages[-1][1] + len(segments) * again))
    policies, costs, marks, reached = list[Policy](), list[float](), list[int](), 0.0
    for stage, end in stages:
        before, reached = reached, max(reached, end)
        costs += [before + (reached - before) * place / len(stage) for place in range(1, len(stage) + 1)]
        policies += stage
        marks.append(len(policies) - 1)
    return RematLadder(policies, costs, marks)


def every(way: str, blocks: int) -> Policy:
    return way if way in POLICY_NAMES else format_policy([(way, blocks)])


def worthwhile(prices: StepCost) -> list[str]:
    """Of the ways to make a block again those that save much for what they cost, and all of it."""
    uniform = {way: every(way, prices.layers) for way in WAYS[1:]}
    kept = {way: prices.kept_bytes(policy) for way, policy in uniform.items()}
    found, here, left = list[str](), "light", list(WAYS[2:])
    while left:
        saved = {way: kept[here] - kept[way] for way in left}
        able = [way for way in left if saved[way] > 0 or way == left[-1]]
        way = min(
            able, key=lambda way: prices.cost_per_block(uniform[way], uniform[here]) / max(1, saved[way])
        )
        found.append(way)
        here, left = way, left[left.index(way) + 1 :]
    return found


def longer(blocks: int) -> Iterator[Policy]:
    """Segments, by how many of the values between blocks live at a time: fewer and fewer."""
    for alive in range(blocks - 1, 0, -1):
        dropped, stretches = blocks - alive, list[PolicyPart]()
        while dropped and alive > len(stretches) + 1:
            inner = min(dropped, alive - len(stretches) - 1)
            stretches.append((SEGMENT, inner + 1))
            dropped -= inner
        if dropped:
            return
        yield format_policy([*stretches, ("block", blocks - sum(count for _, count in stretches))])
