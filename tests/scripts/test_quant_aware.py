"""Quantization-aware training recovers what rounding costs, as `bench.py rounding` measures it."""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from bench.plays import make_play
from bench.quant_aware import MIN_RECOVERED, Comparison, compare_rounding


def test_shares_of_what_is_lost() -> None:
    found = Comparison(exact=10.0, rounded_after=14.0, rounded_in_training=11.0)
    assert (found.lost, found.recovered) == (4.0, 0.75)


@pytest.mark.parametrize("kind", ["q4_0"])
def test_half_of_what_rounding_costs_is_recovered(kind: str, tmp_path: Path) -> None:
    text = make_play(random.Random(1), 1 << 17)
    border = len(text) * 9 // 10
    train, validation = tmp_path / "train.txt", tmp_path / "validation.txt"
    train.write_text(text[:border])
    validation.write_text(text[border:])
    found = compare_rounding(train, validation, tmp_path, kind=kind, steps=120, more=80, seed=0, threads=2)
    assert found.rounded_after > 1.005 * found.exact, "rounding costs something"
    assert found.recovered > MIN_RECOVERED, found
