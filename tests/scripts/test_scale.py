"""`bench.py scale`: what it makes of the runs that it times."""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import scale
from scale import Job, Timings

from llamatrain.planner.scaling_model import LinkModel, predict_seconds

TRUE = LinkModel(micro=0.2, update=0.1, byte=1e-9, message=1e-4, spread=0.05)
TRAINED = 20_000_000


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    """Whose runs take what the model says, and a thousandth more or less."""

    def time(job: Job, into: Timings, iters: int, where: Any = ()) -> None:
        into.micro, into.groups = 8 * into.batches, 8
        into.seconds = [1.0]
        seconds = predict_seconds(scale.case_of(into, TRAINED), TRUE)
        into.seconds, into.exposed = [0.999 * seconds, seconds, 1.001 * seconds], [0.01]

    monkeypatch.setattr(Job, "time", time)
    monkeypatch.setattr(Job, "trained", TRAINED)
    monkeypatch.setattr(scale, "count_cores", lambda: 2)
    return Job("S f32", (), Path())


def asked(**more: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{"ranks": [1, 2, 3, 4], "batches": [1, 2], "rounds": 1, "iters": 3, "held_out": 0, **more}
    )


def test_what_is_held_out_is_foretold(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    scale.bench_ranks(job, asked())
    said = capsys.readouterr().out
    assert "fitted to 1, 2, 3 ranks: a micro-batch 200 ms" in said
    ratios = re.findall(r"(\d) ranks, \d batches: +[\d.]+ ms, +([\d.]+) of what was measured, (.*)", said)
    assert [(ranks, kind) for ranks, _, kind in ratios] == [
        (r, "held out" if r == "4" else "fitted") for r in "12341234"
    ]
    assert [float(ratio) for _, ratio, _ in ratios] == pytest.approx([1.0] * 8, abs=0.02)


def test_another_one_may_be_held_out(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    scale.bench_ranks(job, asked(held_out=2))
    assert "fitted to 1, 3, 4 ranks" in capsys.readouterr().out


def test_nothing_is_foretold_from_one_alone(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    scale.bench_ranks(job, asked(ranks=[1, 2]))
    assert "fitted" not in capsys.readouterr().out


def test_efficiency_is_of_the_processors_that_are_used(job: Job) -> None:
    """Four ranks on two processors cannot be faster than two."""
    one, two, four = (Timings(ranks, 1, 1) for ranks in (1, 2, 4))
    one.seconds, two.seconds, four.seconds = [1.0], [0.5], [0.5]
    assert [float(each.figures(one).split()[2]) for each in (one, two, four)] == [1.0, 1.0, 1.0]
    two.seconds, two.exposed = [0.625], [0.025]
    assert two.figures(one).split()[2:] == ["0.800", "25.0", "4.0%"]
