"""How long a step takes on several ranks: the model's arithmetic, and what is found of it in measurements."""

import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llamatrain.planner.scaling_model import LinkModel, ShardedStep, expected_slowest, step_seconds
from llamatrain.planner.speeds import least_squares

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from bench.fit_scaling import TimedStep, fit_link_model, predict_seconds

MB = 1 << 20
TEMPO = LinkModel(micro=0.3, update=0.08, byte=1e-9, message=1e-4, spread=0.1)


def step(ranks: int, **other: int) -> ShardedStep:
    return ShardedStep(**{"ranks": ranks, "micro": 8, "groups": 8, "trained": 24 * MB, **other})


# ---- who has what ------------------------------------------------------------


def test_a_rank_alone_has_all_and_sends_nothing() -> None:
    alone, found = step(1), step_seconds(step(1), TEMPO)
    assert (alone.max_micro, alone.sent_gradients, alone.sent_weights) == (8, 0, 0)
    assert found.exposed == found.imbalance == 0 and found.total == pytest.approx(8 * 0.3 + 0.08)


@pytest.mark.parametrize(
    ("ranks", "micro", "groups", "most"),
    [(2, 8, 8, 4), (3, 8, 8, 3), (5, 8, 8, 2), (8, 8, 8, 1), (4, 12, 8, 3), (3, 4, 4, 2), (2, 5, 4, 3)],
)
def test_the_rank_with_most_of_it_decides(ranks: int, micro: int, groups: int, most: int) -> None:
    assert step(ranks, micro=micro, groups=groups).max_micro == most


def test_every_group_has_one_rank() -> None:
    for ranks in range(1, 17):
        assert [group for groups in step(ranks, groups=16).rank_groups for group in groups] == [*range(16)]


def test_sums_are_of_whole_branches() -> None:
    """Of three ranks one has two groups and a third that lie under no branch together."""
    assert [step(ranks).max_sums for ranks in (1, 2, 3, 4, 8)] == [1, 1, 2, 1, 1]


# ---- seconds ----------------------------------------------------------------


def test_two_ranks_by_hand() -> None:
    """96 MB are three buckets, half of each goes out: 16 MB, a message and a meeting; behind 0.2 s all but the last is hidden."""
    two = step(2)
    assert (two.buckets, two.sent_gradients, two.sent_weights) == (3, 48 * MB, 48 * MB)
    assert [step(2, trained=trained).buckets for trained in (1, 8 * MB, 8 * MB + 1)] == [1, 1, 2]
    found, bucket = step_seconds(two, TEMPO), 16 * MB * 1e-9 + 1e-4 + 1e-4
    assert found.compute == pytest.approx(1.2) and found.update == pytest.approx(0.04)
    assert found.exchange == pytest.approx(bucket)
    assert found.weight_gather == pytest.approx(48 * MB * 1e-9 + 3e-4 + 1e-4)
    assert found.small_gathers == pytest.approx(3e-4)
    assert found.imbalance == pytest.approx(1.2 * 0.1 * expected_slowest(2))
    assert found.total == pytest.approx(1.2 + 0.04 + bucket + found.weight_gather + 3e-4 + found.imbalance)


def test_what_computing_does_not_hide_is_waited_for() -> None:
    slow = replace(TEMPO, byte=1e-8)
    bucket = 16 * MB * 1e-8 + 2e-4
    assert step_seconds(step(2), slow).exchange == pytest.approx(bucket + 2 * bucket - 0.2)


def test_half_the_bytes_on_the_wire_and_a_shared_link() -> None:
    assert (
        step(2, grad_bytes=2).sent_gradients == step(2).sent_gradients / 2
        and step(2, grad_bytes=2).sent_weights == step(2).sent_weights
    )
    shared, own = (
        step_seconds(step(4), TEMPO, ranks_per_host=2),
        step_seconds(step(4), replace(TEMPO, byte=2e-9)),
    )
    assert shared.total == pytest.approx(own.total)


def test_the_slowest_of_many() -> None:
    """Means of the largest of n normals (Harter 1961): 0.5642, 1.0294, 1.5388, 2.5076 for 2, 4, 10, 100."""
    assert expected_slowest(1) == 0
    assert [expected_slowest(n) for n in (2, 4, 10, 100)] == pytest.approx(
        [0.5642, 1.0294, 1.5388, 2.5076], rel=0.05
    )


def test_more_of_anything_takes_longer() -> None:
    random.seed(1)
    for _ in range(30):
        ranks = random.choice([2, 3, 4, 16, 64])
        at = step(ranks, micro=random.randint(64, 200), groups=64, trained=random.randint(1, 10**9))
        tempo = LinkModel(
            **{name: 10 ** random.uniform(-9, 0) for name in ("micro", "update", "byte", "message", "spread")}
        )
        total = step_seconds(at, tempo).total
        for name in ("update", "byte", "message", "spread", "micro"):
            assert step_seconds(at, replace(tempo, **{name: 2 * getattr(tempo, name)})).total >= total, name
        assert step_seconds(replace(at, trained=2 * at.trained), tempo).total >= total
        assert step_seconds(replace(at, micro=2 * at.micro), tempo).total >= total
        assert step_seconds(at, tempo).compute <= step_seconds(replace(at, ranks=ranks - 1), tempo).compute


# ---- from measurements ------------------------------------------------------


def made_up(tempo: LinkModel, noise: float = 0.0) -> list[TimedStep]:
    random.seed(3)
    cases = []
    for ranks in (1, 2, 3, 4):
        for micro in (8, 16, 24):
            at = step(ranks, micro=micro)
            cases.append(
                TimedStep(step=at, seconds=step_seconds(at, tempo).total * (1 + random.gauss(0, noise)))
            )
    return cases


@pytest.mark.parametrize(
    "tempo", [TEMPO, replace(TEMPO, byte=1e-8), replace(TEMPO, spread=0.0), replace(TEMPO, micro=0.01)]
)
def test_what_was_made_up_is_found_again(tempo: LinkModel) -> None:
    found = fit_link_model(made_up(tempo))
    for at in (step(4), step(3, micro=80), step(8, micro=32)):
        assert step_seconds(at, found).total == pytest.approx(step_seconds(at, tempo).total, rel=1e-3)
    assert found.micro == pytest.approx(tempo.micro, rel=1e-3) and found.update == pytest.approx(
        tempo.update, rel=1e-2
    )


def test_what_was_held_out_is_foretold() -> None:
    """Of measurements that are off by a hundredth."""
    cases = made_up(TEMPO, noise=0.01)
    found = fit_link_model([each for each in cases if each.step.ranks != 4])
    for each in cases:
        assert step_seconds(each.step, found).total == pytest.approx(each.seconds, rel=0.05)


def test_ranks_that_take_turns_take_longer() -> None:
    alone = [TimedStep(step=step(1, micro=m), seconds=0.3 * m) for m in (4, 8)]
    crowded = [
        TimedStep(step=step(4, micro=m, trained=1), seconds=2 * 0.3 * m / 4, crowding=2) for m in (4, 8)
    ]
    found = fit_link_model(alone + crowded)
    assert found.micro == pytest.approx(0.3) and found.spread == pytest.approx(0, abs=1e-6)
    assert [predict_seconds(each, found) for each in alone + crowded] == pytest.approx([1.2, 2.4, 0.6, 1.2])


def test_no_unknown_is_below_nothing() -> None:
    assert least_squares([[1, 1, 1], [1, 2, 3]], [3, 5, 7]) == pytest.approx([1, 2])
    assert (least_squares([[1, 1, 1], [1, 2, 3]], [5, 4, 3]) >= 0).all()
    assert least_squares([[1, 2], [1, 2]], [1, 2]).tolist().count(0.0) == 1, (
        "where two are one, one of them will do"
    )
    assert np.isfinite(least_squares([[0, 0], [1, 2]], [1, 2])).all()
