"""Learning rates by hand, step by step."""

import math
from itertools import pairwise
from pathlib import Path

import pytest

from llamatrain.errors import UsageError
from llamatrain.optim.schedule import Schedule
from tests.helpers.cli import TINY, ran, steps, text_file


def rates(schedule: Schedule, steps: int) -> list[float]:
    return [schedule.rate(step) for step in range(1, steps + 1)]


def test_constant_with_a_warm_up_from_the_minimum() -> None:
    schedule = Schedule("constant", peak=1.0, minimum=0.2, warmup=4)
    assert rates(schedule, 6) == pytest.approx([0.4, 0.6, 0.8, 1.0, 1.0, 1.0])


def test_linear_falls_to_the_minimum_and_stays() -> None:
    schedule = Schedule("linear", peak=1.0, minimum=0.2, warmup=2, decay_steps=4)
    assert rates(schedule, 8) == pytest.approx([0.6, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_cosine_by_hand() -> None:
    schedule = Schedule("cosine", peak=1.0, minimum=0.0, warmup=2, decay_steps=4)
    half = math.sqrt(0.5) / 2
    assert rates(schedule, 8) == pytest.approx([0.5, 1.0, 0.5 + half, 0.5, 0.5 - half, 0.0, 0.0, 0.0])


def test_without_a_warm_up_the_first_step_has_the_peak() -> None:
    assert rates(Schedule("cosine", peak=1.0, decay_steps=2), 3) == pytest.approx([1.0, 0.5, 0.0])
    assert rates(Schedule("linear", peak=1.0, warmup=1, decay_steps=2), 3) == pytest.approx([1.0, 0.5, 0.0])


def test_restarts_with_growing_periods() -> None:
    schedule = Schedule("cosine", peak=1.0, minimum=0.1, warmup=3, decay_steps=4, restart_growth=1.5)
    ends = [3 + 4, 3 + 4 + 6, 3 + 4 + 6 + 9]
    for end, period, following in zip(ends, (4, 6, 9), (6, 9, 13.5), strict=True):
        assert schedule.rate(end) == pytest.approx(0.1)  # cos(pi)
        assert schedule.rate(end + 1) == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / following)))
        if period % 2 == 0:
            assert schedule.rate(end - period // 2) == pytest.approx(0.55)  # cos(pi / 2)


def test_restarts_of_equal_length_repeat() -> None:
    schedule = Schedule("cosine", peak=1.0, decay_steps=5, restart_growth=1.0)
    found = rates(schedule, 16)
    assert found[1:6] == found[6:11] == found[11:16]


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_no_jump_at_the_seams(kind: str) -> None:
    schedule = Schedule(kind, peak=1.0, minimum=0.1, warmup=1000, decay_steps=5000)
    found = rates(schedule, 8000)
    assert found[999] == 1.0 == max(found)
    assert min(found) >= 0.1
    assert max(abs(a - b) for a, b in pairwise(found)) < 0.002
    assert found[5999] == pytest.approx(1.0 if kind == "constant" else 0.1)
    assert set(found[6000:]) == {found[5999]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "polynomial"},
        {"minimum": 2.0},
        {"peak": math.nan},
        {"warmup": -1},
        {"decay_steps": 0},
        {"restart_growth": 0.5},
        {"kind": "linear", "restart_growth": 2.0},
    ],
)
def test_what_cannot_be_meant_is_refused(wrong: dict) -> None:
    with pytest.raises(UsageError):
        Schedule(**{"peak": 1.0, "decay_steps": 10, **wrong})


def test_a_stable_rate_that_falls_at_the_end() -> None:
    schedule = Schedule("wsd", peak=1.0, minimum=0.2, warmup=2, decay_steps=4, end=10)
    falling = [1 - 0.8 * math.sqrt(part / 4) for part in (1, 2, 3, 4)]
    assert rates(schedule, 12) == pytest.approx([0.6, 1.0, 1.0, 1.0, 1.0, 1.0, *falling, 0.2, 0.2])
    longer = Schedule("wsd", peak=1.0, minimum=0.2, warmup=2, decay_steps=4, end=12)
    assert rates(longer, 6) == rates(schedule, 6) and longer.rate(8) == 1.0


def test_a_fall_that_is_longer_than_the_run_begins_after_the_warm_up() -> None:
    found = rates(Schedule("wsd", peak=1.0, warmup=2, decay_steps=40, end=10), 10)
    assert found[1] == 1.0 and all(a > b for a, b in pairwise(found[1:])) and found[-1] == 0.0


@pytest.mark.parametrize("kind", ["linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [(), ("--warmup", 0), ("--warmup", 1), ("--warmup", 2)], ids=str)
def test_a_run_reaches_the_lowest_rate_in_its_last_step(
    kind: str, warmup: tuple[str | int, ...], tmp_path: Path
) -> None:
    """Without a warm-up, too; 5 % of few steps are none."""
    given = (
        "--schedule",
        kind,
        "--lr",
        1e-3,
        "--lr-min",
        1e-5,
        *warmup,
        "--iters",
        5,
        "--ctx",
        16,
        "--batch",
        1,
    )
    ran("from-scratch", text_file(tmp_path), *TINY, *given, "--out", tmp_path / "run")
    found = [line["lr"] for line in steps(tmp_path / "run")]
    assert max(found) == pytest.approx(1e-3) and found[-1] == pytest.approx(1e-5, rel=1e-9)
    assert all(rate > 1e-5 for rate in found[:-1])


def test_a_checkpoint_keeps_the_length_of_its_decay(tmp_path: Path) -> None:
    """A checkpoint of an earlier version, whose decay without a warm-up took one step more, goes on with that."""
    given = (
        "--warmup",
        0,
        "--decay-steps",
        5,
        "--iters",
        5,
        "--ctx",
        16,
        "--batch",
        1,
        "--save-every",
        2,
        "--keep",
        9,
    )
    ran("from-scratch", text_file(tmp_path), *TINY, *given, "--out", tmp_path / "whole")
    whole = [line["lr"] for line in steps(tmp_path / "whole")]
    ran("from-scratch", "--resume", tmp_path / "whole" / "checkpoint-2.gguf", "--out", tmp_path / "rest")
    assert [line["lr"] for line in steps(tmp_path / "rest")][-3:] == whole[2:]
    assert whole[-1] > 1e-4
