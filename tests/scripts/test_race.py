"""The race of new models with torch: both sides learn the same text, and are evaluated alike."""

import argparse
import math
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from bench import race, recipes
from bench.plays import make_play

VOCABULARY = 300


@pytest.mark.slow  # torch compiles its steps
def test_both_sides_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    shape = {"embd": 32, "head": 2, "layer": 1, "ctx": 16, "batch": 4}
    for module, name, value in (
        (recipes, "SHAPE", shape),
        (race, "SHAPE", shape),
        (recipes, "VOCABULARY", str(VOCABULARY)),
        (race, "RATES", (0.01,)),
        (race, "PEER_RATES", (0.01,)),
        (race, "PEER_BATCHES", (4,)),
    ):
        monkeypatch.setattr(module, name, value)
    text = tmp_path / "text.txt"
    text.write_text(make_play(random.Random(1), 30 * recipes.BLOCK))
    args = argparse.Namespace(text=text, budget=2.0, threads=1, torch=True, kernels="cpu")
    code = race.bench_race(args)
    rows = [
        line.split()
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(("torch ", "llamatrain "))
    ]
    losses = {row[0]: float(row[-1]) for row in rows}
    assert len(rows) == 2 and losses.keys() == {"torch", "llamatrain"}
    assert all(0.5 < loss < 0.8 * math.log(VOCABULARY) for loss in losses.values())
    assert code == (losses["llamatrain"] > losses["torch"])
