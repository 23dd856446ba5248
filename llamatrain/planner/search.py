"""Searches for the fastest plan that fits the memory.

A plan varies in how much is recomputed in the backward pass, in how many micro-batches a batch is split into,
and in whether the matrices of a base are copied to bf16.
"""

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from llamatrain.graph.remat_policy import Policy
from llamatrain.planner.cost import StepCost, step_cost
from llamatrain.planner.memory import MIN_SPLIT_TOKENS, MemoryDemand, MemoryPlan, split_batch
from llamatrain.train.graphs import StepSpec

Planner = Callable[[StepSpec, Policy, MemoryDemand, int], MemoryPlan]
DEFAULT_POLICY = "light"
DEEP_LADDER = ["none", "light", "block"]


@dataclass(frozen=True, kw_only=True)
class PlanCandidate:
    """A step to plan, with one choice of how the base's matrices are held."""

    cache: str
    spec: StepSpec
    demand: MemoryDemand

    def split_counts(self) -> Iterator[int]:
        """Yield the numbers of micro-batches that a batch may be split into: 1, 2, 4 and so on."""
        yield 1
        splits, batch, length = 2, self.spec.batch, max(self.demand.lengths)
        can_add = self.spec.gradients != "streamed"
        while can_add and batch % splits == 0 and batch // splits * length >= MIN_SPLIT_TOKENS:
            yield splits
            splits *= 2


@dataclass(frozen=True, kw_only=True)
class PlanTrial:
    """The outcome of a plan that was tried. Its graphs are not kept."""

    candidate: PlanCandidate
    splits: int
    policy: Policy
    total: int  # bytes
    cost: float  # nominal seconds of a step


class SplitCandidate:
    """A candidate with a number of micro-batches, and its cost by policy."""

    def __init__(self, candidate: PlanCandidate, splits: int) -> None:
        self.candidate, self.splits = candidate, splits
        self.length = max(candidate.demand.lengths)
        self.batches = candidate.demand.batches * splits
        self.cost = StepCost(split_batch(candidate.spec, splits), self.length, self.batches).cost


@dataclass(kw_only=True)
class PlanSearch:
    """Tries plans, and remembers the fastest that fits and the smallest of all."""

    policy: Policy | None  # the policy that the user chose; None: any
    limit: int | None  # bytes
    may_split: bool
    planner: Planner
    is_deep: bool = False  # the planner extrapolates: trial costs are estimates, and few policies are tried
    trials: dict[tuple[str, int, Policy], PlanTrial] = field(default_factory=dict)
    fastest: tuple[PlanTrial, MemoryPlan] | None = None
    smallest: tuple[PlanTrial, MemoryPlan] | None = None

    def run(self, candidates: Sequence[PlanCandidate]) -> tuple[PlanTrial, MemoryPlan]:
        """Return the default plan if it fits, else the fastest that fits, else the smallest one tried."""
        default = self.policy or DEFAULT_POLICY
        if not self.fits(self.try_plan(SplitCandidate(candidates[0], 1), default)):
            splits = [
                SplitCandidate(candidate, count)
                for candidate in candidates
                for count in (candidate.split_counts() if self.may_split else (1,))
            ]
            splits.sort(key=lambda split: split.cost(default))
            self._try_until_one_fits(splits, default)
            if self.policy is None:
                for split in splits:
                    self._search_policies(split)
                if not self.fastest and not self.is_deep:
                    self._try_until_one_fits(splits, "optimal")
        best = self.fastest or self.smallest
        assert best
        return best

    def _try_until_one_fits(self, splits: Sequence[SplitCandidate], policy: Policy) -> None:
        """Try a policy with each split; the splits are sorted by cost, so the first that fits is the fastest."""
        any(self.fits(self.try_plan(split, policy)) for split in splits)

    def _search_policies(self, split: SplitCandidate) -> None:
        """Find, by bisection, the cheapest policy that fits, among those cheaper than the best plan so far.

        Policies further down the ladder cost more and take less memory.
        """
        bound = self.fastest[0].cost if self.fastest else math.inf
        ladder = [policy for policy in self._ladder(split) if split.cost(policy) < bound]
        if not ladder or not self.fits(self.try_plan(split, ladder[-1])):
            return
        low, high = -1, len(ladder) - 1  # ladder[high] fits, ladder[low] does not
        while high - low > 1:
            middle = (low + high) // 2
            if self.fits(self.try_plan(split, ladder[middle])):
                high = middle
            else:
                low = middle

    def _ladder(self, split: SplitCandidate) -> list[Policy]:
        """Return policies from the fastest to the smallest."""
        if self.is_deep:
            return [*DEEP_LADDER]
        blocks = split.candidate.spec.h.layers - 1  # the last block is never recomputed
        return ["none", "light", *map(str, range(1, blocks)), "block"]

    def try_plan(self, split: SplitCandidate, policy: Policy) -> PlanTrial:
        """Plan once, and remember the outcome."""
        candidate, key = split.candidate, (split.candidate.cache, split.splits, policy)
        if key in self.trials:
            return self.trials[key]
        if self.trials:
            gc.collect()  # graphs of earlier plans would add to peak memory
        with pause_gc():
            plan = self.planner(candidate.spec, policy, candidate.demand, split.splits)
            cost = split.cost(policy) if self.is_deep else step_cost(plan.graphs, split.length, split.batches)
        trial = PlanTrial(
            candidate=candidate, splits=split.splits, policy=plan.policy, total=plan.total, cost=cost
        )
        self.trials[key] = trial
        if self.fits(trial) and (self.fastest is None or cost < self.fastest[0].cost):
            self.fastest = trial, plan
        if self.smallest is None or trial.total < self.smallest[0].total:
            self.smallest = trial, plan
        return trial

    def fits(self, trial: PlanTrial) -> bool:
        """Return True if a plan takes no more than the limit."""
        return self.limit is None or trial.total <= self.limit


@contextmanager
def pause_gc() -> Iterator[None]:
    """Switch off garbage collection, which would walk a growing graph again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
