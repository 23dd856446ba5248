"""The plan found for a memory limit: none of the usual ones that fit costs less."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from llamatrain.graph.tensor import BF16, DType, quantized
from llamatrain.model.frozen_weights import bf16_copy_bytes
from llamatrain.model.transformer import trainable_weights
from llamatrain.planner import speeds
from llamatrain.planner.cost import step_cost
from llamatrain.planner.memory import MemoryDemand, MemoryPlan, plan_memory
from llamatrain.planner.search import PlanCandidate, PlanSearch, PlanTrial, SplitCandidate
from llamatrain.train.graphs import StepSpec

NAMED = ("none", "light", "block", "optimal")
KNOWN = dict[int, PlanCandidate]()


def make_spec(base: DType | None, layers: int = 5, batch: int = 8, length: int = 64, **more: Any) -> StepSpec:
    start = StepSpec(
        **dict.fromkeys(("h", "weights", "trainable", "batch", "rope_length")), precision="f32", threads=1
    )
    spec = speeds.small_spec(start, base, (64, 4, 192, 256, length, batch))
    h = replace(spec.h, layers=layers)
    weights = speeds.adapter_weights(h, base) if base else trainable_weights(h)
    factors = [
        factor for deltas in weights.deltas.values() for delta in deltas for factor in (delta.a, delta.b)
    ]
    trainable = {tensor.name: tensor for tensor in (factors if base else weights.tensors.values())}
    return replace(spec, h=h, weights=weights, trainable=trainable, gradients="arena", **more)


@cache
def make_candidates(name: str) -> list[PlanCandidate]:
    caches = {"new": [("auto", None)], "adapter": [("bf16", BF16), ("off", quantized("Q8_0"))]}[name]
    candidates = []
    for cached, dtype in caches:
        spec = make_spec(dtype, precision="bf16", layers=4, batch=4) if dtype else make_spec(None)
        demand = MemoryDemand(
            lengths=[64],
            has_validation=False,
            decoder_positions=0,
            resident=10**7,
            copy_bytes=bf16_copy_bytes(spec.h) if cached == "bf16" else 0,
        )
        candidate = KNOWN[id(spec)] = PlanCandidate(cache=cached, spec=spec, demand=demand)
        candidates.append(candidate)
    return candidates


@cache
def plan_once(spec: int, policy: str | int, splits: int) -> MemoryPlan:
    candidate = KNOWN[spec]
    return plan_memory(candidate.spec, policy, candidate.demand, splits)


def planner(spec: StepSpec, policy: str | int, demand: MemoryDemand, splits: int = 1) -> MemoryPlan:
    """Plan each case once for all limits."""
    return plan_once(id(spec), policy, splits)


def named_plans(candidates: list[PlanCandidate]) -> Iterator[tuple[int, float]]:
    """Yield bytes and cost of the plans with a named policy."""
    for candidate in candidates:
        for splits in candidate.split_counts():
            for policy in NAMED:
                plan = planner(candidate.spec, policy, candidate.demand, splits)
                yield plan.total, step_cost(plan.graphs, 64, splits)


def search(
    candidates: list[PlanCandidate], limit: int | None, **more: Any
) -> tuple[PlanSearch, PlanTrial, MemoryPlan]:
    settings = {"policy": None, "limit": limit, "may_split": True, "planner": planner, **more}
    plan_search = PlanSearch(**settings)
    return plan_search, *plan_search.run(candidates)


@pytest.mark.parametrize("name", ["new", "adapter"])
def test_no_named_plan_that_fits_costs_less(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "collect", lambda: 0)  # it takes longer here than everything else
    candidates = make_candidates(name)
    plans = list(named_plans(candidates))
    light = planner(candidates[0].spec, "light", candidates[0].demand).total
    least = min(total for total, _ in plans)
    assert least < 0.95 * light
    for limit in (least, (least + light) // 2, light - 1):
        plan_search, trial, plan = search(candidates, limit)
        assert trial.total == plan.total <= limit
        assert trial.cost <= min(cost for total, cost in plans if total <= limit) * (1 + 1e-9)
        assert len(plan_search.trials) <= 24
    too_low = least * 2 // 3
    assert name == "adapter" or search(candidates, too_low)[1].total > too_low, "the smallest plan, too large"


def test_a_default_plan_that_fits_is_the_only_trial() -> None:
    for limit in (None, 10**10):
        plan_search, trial, plan = search(make_candidates("adapter"), limit)
        assert len(plan_search.trials) == 1
        assert (trial.candidate.cache, plan.splits, plan.policy) == ("bf16", 1, "light")


@pytest.mark.parametrize("policy", NAMED)
def test_a_chosen_policy_is_kept(policy: str) -> None:
    """Only the batch is split, if that is allowed and helps."""
    (candidate,) = make_candidates("new")
    whole, halves = (planner(candidate.spec, policy, candidate.demand, splits).total for splits in (1, 2))
    for may_split, expected in ((True, 2 if halves < whole else 1), (False, 1)):
        plan_search, _, plan = search([candidate], whole - 1, policy=policy, may_split=may_split)
        assert (plan.policy, plan.splits, len(plan_search.trials)) == (policy, expected, 1 + may_split)
    assert search([candidate], whole, policy=policy)[2].splits == 1


def test_some_blocks_are_recomputed_between_light_and_block() -> None:
    (candidate,) = make_candidates("new")
    totals = {
        policy: planner(candidate.spec, policy, candidate.demand).total for policy in ("light", "2", "block")
    }
    assert totals["block"] < totals["2"] < totals["light"]
    _, trial, plan = search([candidate], totals["2"], may_split=False)
    assert plan.policy in ("1", "2")
    assert trial.cost < step_cost(planner(candidate.spec, "block", candidate.demand).graphs, 64, 1)


@pytest.mark.parametrize("name", ["new", "adapter"])
def test_costs_are_extrapolated_from_few_layers(name: str) -> None:
    candidate = make_candidates(name)[-1]
    for splits in candidate.split_counts():
        split = SplitCandidate(candidate, splits)
        for policy in ("none", "light", "block"):
            exact = step_cost(planner(candidate.spec, policy, candidate.demand, splits).graphs, 64, splits)
            assert split.cost(policy) == pytest.approx(exact, rel=1e-6)
        half = step_cost(planner(candidate.spec, "2", candidate.demand, splits).graphs, 64, splits)
        assert split.cost("2") == pytest.approx(half, rel=0.02)


def test_a_deep_model_is_tried_with_few_policies() -> None:
    (candidate,) = make_candidates("new")
    plan_search, _, _ = search([candidate], 1, is_deep=True, may_split=False)
    assert {policy for _, _, policy in plan_search.trials} <= {"none", "light", "block"}
