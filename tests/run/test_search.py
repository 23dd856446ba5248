"""The way to run that is found for a limit: none of the usual ones that fit costs less."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from llamatrain.engine.remat_budget import find_cheapest
from llamatrain.graph.tensor import BF16, DType, quantized
from llamatrain.model.frozen_weights import bf16_copy_bytes
from llamatrain.planner import speeds
from llamatrain.planner.cost import step_cost
from llamatrain.planner.memory import MemoryDemand, MemoryPlan, plan_memory
from llamatrain.planner.remat_ladder import RematLadder, longer, road_of
from llamatrain.run.search import MicrobatchSplit, PlanCandidate, PlanSearch, PlanTrial
from llamatrain.run.trainable import TrainableWeights
from llamatrain.train.graphs import StepSpec

NAMED = ("none", "light", "block", "optimal")


def setting_of(
    base: DType | None, layers: int = 5, batch: int = 8, length: int = 64, **more: Any
) -> StepSpec:
    start = StepSpec(
        **dict.fromkeys(("h", "weights", "trained", "batch", "positions")), precision="f32", threads=1
    )
    made = speeds.small_spec(start, base, (64, 4, 192, 256, length, batch))
    h = replace(made.h, layers=layers)
    weights = speeds.adapter_weights(h, base) if base else speeds.parameters(h)
    factors = [
        factor for deltas in weights.deltas.values() for delta in deltas for factor in (delta.a, delta.b)
    ]
    trained = {each.name: each for each in (factors if base else weights.tensors.values())}
    return replace(made, h=h, weights=weights, trainable=trained, gradients="arena", **more)


@cache
def offers_of(name: str) -> list[PlanCandidate]:
    caches = {"new": [("auto", None)], "adapter": [("bf16", BF16), ("off", quantized("Q8_0"))]}[name]
    made = []
    for copied, kind in caches:
        setting = setting_of(kind, precision="bf16", layers=4, batch=4) if kind else setting_of(None)
        demand = MemoryDemand(
            lengths=[64],
            has_validation=False,
            decoder_positions=0,
            resident=10**7,
            copy_bytes=bf16_copy_bytes(setting.h) if copied == "bf16" else 0,
        )
        leaves = TrainableWeights(weights=setting.weights, trainable=setting.trainable)
        offer = KNOWN[id(setting)] = PlanCandidate(cache=copied, weights=leaves, spec=setting, demand=demand)  # type: ignore[arg-type]
        made.append(offer)
    return made


@cache
def planned(setting: int, policy: str | int, splits: int) -> MemoryPlan:
    """Once for all limits."""
    offer = KNOWN[setting]
    return plan_memory(offer.spec, policy, offer.demand, splits)


KNOWN = dict[int, PlanCandidate]()


def planner(setting: StepSpec, policy: str | int, demand: MemoryDemand, splits: int = 1) -> MemoryPlan:
    return planned(id(setting), policy, splits)


def usual(offers: list[PlanCandidate]) -> Iterator[tuple[int, float]]:
    """Bytes and costs of the ways that have names."""
    for offer in offers:
        for splits in offer.split_counts():
            for policy in NAMED:
                way = planner(offer.spec, policy, offer.demand, splits)
                yield way.total, step_cost(way.graphs, 64, splits)


def searched(
    offers: list[PlanCandidate], most: int | None, **more: Any
) -> tuple[PlanSearch, PlanTrial, MemoryPlan]:
    search = PlanSearch(**{"remat": "auto", "most": most, "parts": True, "planner": planner, **more})
    return search, *search.fastest(offers)


@pytest.mark.parametrize("name", ["new", "adapter"])
def test_no_usual_way_that_fits_costs_less(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "collect", lambda: 0)  # which takes longer here than all else
    offers = offers_of(name)
    ways = list(usual(offers))
    light = planner(offers[0].spec, "light", offers[0].demand).total
    least = min(total for total, _ in ways)
    assert least < 0.95 * light
    for limit in (least, (least + light) // 2, light - 1):
        search, found, way = searched(offers, limit)
        assert found.total == way.total <= limit
        assert found.cost <= min(cost for total, cost in ways if total <= limit) * (1 + 1e-9)
        assert len(search.tried) <= 16
    assert name == "adapter" or searched(offers, least * 2 // 3)[1].total > least * 2 // 3, (
        "the leanest, which does not fit"
    )


def test_what_fits_is_not_searched_for() -> None:
    """It is the way that a run has without a limit: one plan."""
    for most in (None, 10**10):
        search, found, way = searched(offers_of("adapter"), most)
        assert len(search.tried) == 1 and (found.candidate.cache, way.splits, way.policy) == (
            "bf16",
            1,
            "light",
        )


@pytest.mark.parametrize("remat", NAMED)
def test_what_is_asked_for_is_done(remat: str) -> None:
    """Within the limit by parts alone, where these are open and help."""
    (offer,) = offers_of("new")
    whole, halves = (planner(offer.spec, remat, offer.demand, splits).total for splits in (1, 2))
    for parts, expected in ((True, 2 if halves < whole else 1), (False, 1)):
        search, _, way = searched([offer], whole - 1, remat=remat, parts=parts)
        assert (way.policy, way.splits, len(search.tried)) == (remat, expected, 1 + parts)
    assert searched([offer], whole, remat=remat)[2].splits == 1


def test_halves_of_blocks_and_uneven_segments_are_on_the_road() -> None:
    """Dearer and dearer, and leaner: what is found between two usual ways costs less than the leaner of them."""
    (offer,) = offers_of("new")
    road = road_of(MicrobatchSplit(offer, 1).prices)
    assert (
        road.policies[:2] == ["none", "light"]
        and "4" in road.policies
        and road.policies[-1] == "segment:2,block:2"
    )
    assert road.costs == sorted(road.costs)
    totals = {policy: planner(offer.spec, policy, offer.demand).total for policy in road.policies}
    assert totals[road.policies[-1]] < totals["4"] < totals["light"] < totals["none"]
    limit = (totals["light"] + 2 * totals["4"]) // 3
    _, found, way = searched([offer], limit, parts=False)
    assert way.policy not in NAMED and found.cost < step_cost(
        planner(offer.spec, "block", offer.demand).graphs, 64, 1
    )


@pytest.mark.parametrize("name", ["new", "adapter"])
def test_few_layers_tell_what_many_cost(name: str) -> None:
    """And a road of what it comes to, nearly."""
    offer = offers_of(name)[-1]
    for splits in offer.split_counts():
        parting = MicrobatchSplit(offer, splits)
        road = road_of(parting.prices)
        for policy in ("none", "light", "block"):
            whole = step_cost(planner(offer.spec, policy, offer.demand, splits).graphs, 64, splits)
            assert parting.prices.cost(policy) == pytest.approx(whole, rel=1e-6)
        for policy in (road.policies[mark] for mark in road.marks):
            whole = step_cost(planner(offer.spec, policy, offer.demand, splits).graphs, 64, splits)
            assert road.costs[road.policies.index(policy)] == pytest.approx(whole, rel=0.01)


def test_segments_by_how_much_lives_at_a_time() -> None:
    assert list(longer(5)) == ["segment:2,block:3", "segment:3,block:2"]
    assert list(longer(6))[-1] == "segment:3,segment:2,block:1" and list(longer(2)) == list(longer(1)) == []
    for blocks in (3, 9, 31, 100):
        for policy in longer(blocks):
            counts = [int(each.partition(":")[2]) for each in str(policy).split(",")]
            assert sum(counts) == blocks
        fewest = blocks - len(list(longer(blocks)))
        assert fewest * (fewest + 1) // 2 >= blocks > (fewest - 1) * fewest // 2


def test_a_road_ends_where_it_is_too_dear() -> None:
    road = RematLadder(["none", "light", "1", "2", "3"], [1.0, 1.1, 1.2, 1.3, 1.4], [0, 1, 4])
    assert road.below(1.25) == RematLadder(["none", "light", "1"], [1.0, 1.1, 1.2], [0, 1, 2])
    assert (
        road.below(1.0) == RematLadder([], [], []) and find_cheapest(lambda policy: 1 / 0, [], [], 1) is None
    )  # type: ignore[arg-type]
