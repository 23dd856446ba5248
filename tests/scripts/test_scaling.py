"""Tests of `bench.py scale`: efficiency and predictions from times of runs."""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from bench import scaling
from bench.fit_scaling import predict_seconds
from bench.scaling import Job, Timings

from llamatrain.planner.scaling_model import LinkModel

TRUE = LinkModel(micro=0.2, update=0.1, byte=1e-9, message=1e-4, spread=0.05)
TRAINED = 20_000_000


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    """Return a job whose runs take the seconds of the model, and a thousandth more or less."""

    def time(job: Job, timings: Timings, iters: int, mpi_options: Any = ()) -> None:
        timings.micro = 8 * timings.batches
        timings.groups = 8
        timings.seconds = [1.0]
        seconds = predict_seconds(scaling.make_timed_step(timings, TRAINED), TRUE)
        timings.seconds = [0.999 * seconds, seconds, 1.001 * seconds]
        timings.exposed = [0.01]

    monkeypatch.setattr(Job, "time", time)
    monkeypatch.setattr(Job, "trained", TRAINED)
    monkeypatch.setattr(scaling, "count_cores", lambda: 2)
    return Job("S f32", (), Path())


def arguments(**overrides: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{"ranks": [1, 2, 3, 4], "batches": [1, 2], "rounds": 1, "iters": 3, "held_out": 0, **overrides}
    )


def test_what_is_held_out_is_foretold(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    scaling.bench_ranks(job, arguments())
    output = capsys.readouterr().out
    assert "fitted to 1, 2, 3 ranks: a micro-batch 200 ms" in output
    ratios = re.findall(r"(\d) ranks, \d batches: +[\d.]+ ms, +([\d.]+) of the measured time, (.*)", output)
    assert [(ranks, kind) for ranks, _, kind in ratios] == [
        (r, "held out" if r == "4" else "fitted") for r in "12341234"
    ]
    assert [float(ratio) for _, ratio, _ in ratios] == pytest.approx([1.0] * 8, abs=0.02)


def test_another_one_may_be_held_out(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    scaling.bench_ranks(job, arguments(held_out=2))
    assert "fitted to 1, 3, 4 ranks" in capsys.readouterr().out


def test_nothing_is_foretold_from_one_alone(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    scaling.bench_ranks(job, arguments(ranks=[1, 2]))
    assert "fitted" not in capsys.readouterr().out


def test_efficiency_is_of_the_processors_that_are_used(job: Job) -> None:
    """Check that four ranks on two processors are not expected to be faster than two."""
    one, two, four = (Timings(ranks, 1, 1) for ranks in (1, 2, 4))
    one.seconds, two.seconds, four.seconds = [1.0], [0.5], [0.5]
    assert [float(timings.format_columns(one).split()[2]) for timings in (one, two, four)] == [1.0, 1.0, 1.0]
    two.seconds = [0.625]
    two.exposed = [0.025]
    assert two.format_columns(one).split()[2:] == ["0.800", "25.0", "4.0%"]
