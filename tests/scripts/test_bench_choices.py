"""The benchmarks of what is chosen for users: `minutes`, and `tuning` of adapters."""

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from bench import minutes, tuning
from bench.plays import make_play

from tests.helpers.cli import pairs_file
from tests.helpers.small_models import small, weights, written


def test_minutes_compares_the_choice_with_a_grid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(minutes, "SHAPES", {32: (2, 1)})
    (tmp_path / "text.txt").write_text(make_play(random.Random(1), 600_000))
    args = argparse.Namespace(
        text=tmp_path / "text.txt", minutes=0.05, widths=[32], rates=[0.01, 1e-5], threads=1, kernels="cpu"
    )
    minutes.bench_minutes(args)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if " x " in line]
    assert [line[0] for line in lines] == ["chosen", "32", "32"]
    assert float(lines[2][-1]) > float(lines[1][-1]) > 0  # the lowest rate learns least


def tuned(tmp_path: Path, **options: Any) -> argparse.Namespace:
    """The arguments of `bench.py tuning` for a tiny base."""
    h = small(ctx=32, layers=1)
    (tmp_path / "other").mkdir()
    return argparse.Namespace(
        base=written(tmp_path / "base.gguf", h, weights(h)),
        data=pairs_file(tmp_path),
        val=pairs_file(tmp_path / "other", seed=2),
        steps=2,
        ctx=32,
        threads=1,
        kernels="cpu",
        **options,
    )


def test_tuning_tries_each_setting_with_three_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tuning, "RATES", (1e-3, 1e-2))
    args = tuned(tmp_path, seeds=2, settings=["defaults", "rank 4"], peer=None)
    assert tuning.bench_tuning(args) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if " to " in line]
    assert [line[:8] for line in lines] == ["defaults"] * 2 + ["rank 4  "] * 3


def test_tuning_trains_the_same_rows_with_peft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    monkeypatch.setattr(tuning, "RATES", (1e-3,))
    monkeypatch.setattr(tuning, "PEER_RATES", (1, 100))
    args = tuned(tmp_path, seeds=1, settings=["defaults"], peer=sys.executable)
    assert tuning.bench_tuning(args) == 0
    lines = [line.rsplit(maxsplit=2) for line in capsys.readouterr().out.splitlines()[-9:]]
    assert [line[0] for line in lines[::2]] == ["defaults", *tuning.PEER_SETTINGS]
    (ours, peft, fast), others = (float(line[2]) for line in lines[:3]), lines[3:]
    assert peft == pytest.approx(ours, rel=2e-3) and fast != pytest.approx(ours, rel=2e-3)
    assert len({line[2] for line in others}) == len(others)
