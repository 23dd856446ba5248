"""The fastest way to run that fits the memory: over recomputation, batches in parts, and copies of the base."""

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from llamatrain.engine.remat_budget import find_cheapest
from llamatrain.graph.remat_policy import Policy
from llamatrain.planner.cost import StepCost, step_cost
from llamatrain.planner.extrapolate import pause_gc
from llamatrain.planner.memory import MIN_SPLIT_TOKENS, MemoryDemand, MemoryPlan, split_batch
from llamatrain.planner.remat_ladder import road_of
from llamatrain.run.options import AUTO
from llamatrain.run.trainable import Cache, TrainableWeights
from llamatrain.train.graphs import StepSpec

Planner = Callable[[StepSpec, Policy, MemoryDemand, int], MemoryPlan]


NEAR = 1.0625  # times the memory that there is: where light takes more, keeping more does, too


@dataclass(frozen=True, kw_only=True)
class PlanCandidate:
    """What may be run: with copies of the base, or without."""

    cache: Cache
    weights: TrainableWeights
    spec: StepSpec
    demand: MemoryDemand

    def split_counts(self) -> Iterator[int]:
        """Into how many parts a batch may be run: 1, and more where gradients can be added up."""
        longest, splits, batch = max(self.demand.lengths), 2, self.spec.batch
        yield 1
        while (
            self.spec.gradients != "streamed"
            and batch % splits == 0
            and batch // splits * longest >= MIN_SPLIT_TOKENS
        ):
            yield splits
            splits *= 2


@dataclass(frozen=True, kw_only=True)
class PlanTrial:
    """A way that was planned; its graphs are not kept with it."""

    candidate: PlanCandidate
    splits: int
    policy: Policy
    total: int
    cost: float  # nominal, of a step


class MicrobatchSplit:
    """An offer in so many parts, with what a step costs then."""

    def __init__(self, offer: PlanCandidate, splits: int) -> None:
        self.offer, self.splits = offer, splits
        self.length, self.batches = max(offer.demand.lengths), offer.demand.batches * splits
        self.prices = StepCost(split_batch(offer.spec, splits), self.length, self.batches)


@dataclass(kw_only=True)
class PlanSearch:
    remat: str
    most: int | None
    parts: bool  # whether a batch may be run in several
    planner: Planner
    units: int | None = None  # that a planner counts layers in
    tried: dict[tuple[Cache, int, Policy], PlanTrial] = field(default_factory=dict)
    found: tuple[PlanTrial, MemoryPlan] | None = None  # the cheapest that fits
    leanest: tuple[PlanTrial, MemoryPlan] | None = None

    def fastest(self, offers: Sequence[PlanCandidate]) -> tuple[PlanTrial, MemoryPlan]:
        """What is usual where it fits; else of all that fits the cheapest. Where nothing does, the leanest of what was tried."""
        usual = "light" if self.remat == AUTO else self.remat
        if not self.fits(self.plan(MicrobatchSplit(offers[0], 1), usual)):
            partings = [
                MicrobatchSplit(offer, splits)
                for offer in offers
                for splits in (offer.split_counts() if self.parts else (1,))
            ]
            partings.sort(key=lambda parting: parting.prices.cost(usual))
            any(
                self.fits(self._alone(each, usual)) for each in partings
            )  # the cheapest: what is dearer need not be tried
            if self.remat == AUTO:
                for parting in partings:
                    self._on_the_road(parting)
                for parting in partings if not (self.found or self.units) else ():
                    self._alone(parting, "optimal")
        assert self.leanest
        return self.found or self.leanest

    def _on_the_road(self, parting: MicrobatchSplit) -> None:
        """Whatever costs less than what was found."""
        limit = self.found[0].cost if self.found else math.inf
        if self.most is None or parting.prices.cost("none") >= limit:
            return
        road = road_of(parting.prices, self.units).below(limit)
        if len(road.policies) > 1 and self.plan(parting, "light").total > NEAR * self.most:
            road = road.after(2)
        find_cheapest(lambda policy: self._alone(parting, policy), road.policies, road.marks, self.most)

    def _alone(self, parting: MicrobatchSplit, policy: Policy) -> PlanTrial:
        """What plans before it were made of would lie beside the run."""
        gc.collect()
        with pause_gc():
            return self.plan(parting, policy)

    def plan(self, parting: MicrobatchSplit, policy: Policy) -> PlanTrial:
        offer, splits = parting.offer, parting.splits
        key = offer.cache, splits, policy
        if key not in self.tried:
            way = self.planner(offer.spec, policy, offer.demand, splits)
            cost = (
                parting.prices.cost(way.policy)
                if self.units
                else step_cost(way.graphs, parting.length, parting.batches)
            )
            made = PlanTrial(candidate=offer, splits=splits, policy=way.policy, total=way.total, cost=cost)
            self.tried[key] = made
            if self.fits(made) and (self.found is None or cost < self.found[0].cost):
                self.found = made, way
            if self.leanest is None or made.total < self.leanest[0].total:
                self.leanest = made, way
        return self.tried[key]

    def fits(self, tried: PlanTrial) -> bool:
        return self.most is None or tried.total <= self.most
