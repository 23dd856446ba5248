"""The comparison of recipes: its texts, and how it finds the tokens for a loss."""

import math
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from bench import recipes
from bench.plays import make_play


def test_every_part_of_a_text_is_held_out_once(tmp_path: Path) -> None:
    text = make_play(random.Random(1), 60 * recipes.BLOCK)
    training, validation = recipes.split_text(text, tmp_path)
    held_out = validation.read_text()
    assert len(training.read_text()) + len(held_out) == len(text)
    assert 0.02 < len(held_out) / len(text) < 0.06
    assert text[12 * recipes.BLOCK : 13 * recipes.BLOCK] == held_out[: recipes.BLOCK]


@pytest.mark.parametrize(
    ("losses", "target", "share"),
    [
        ({0.5: 3.0, 1.0: 2.0}, 2.0, 1.0),
        ({0.5: 3.0, 1.0: 2.0}, 2.5, math.sqrt(0.5)),
        ({0.5: 3.0, 1.0: 2.0}, 3.5, 0.5 / math.sqrt(2)),
        ({0.25: 4.0, 0.5: 3.0, 1.0: 2.9}, 3.5, 0.25 * math.sqrt(2)),
        ({0.25: 4.0, 0.5: 3.0, 1.0: 2.9}, 2.8, 2.0),
        ({0.5: 3.0, 1.0: 3.0}, 2.5, math.inf),
    ],
)
def test_the_share_of_the_tokens(losses: dict[float, float], target: float, share: float) -> None:
    assert recipes.find_share(losses, target) == pytest.approx(share)


def test_a_run_of_each_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "SHAPE", {"embd": 32, "head": 2, "layer": 1, "ctx": 16, "batch": 2})
    monkeypatch.setattr(recipes, "VOCABULARY", "300")
    texts = recipes.prepare_texts(make_play(random.Random(1), 30 * recipes.BLOCK), tmp_path, 1)
    for name in recipes.RECIPES:
        result = recipes.train(texts, name, 4, 0, 1, lr=0.01, weight_decay=0.1)
        assert 3 < result.loss < math.log(300) + 1
        assert result.tokens == 4 * 2 * 16 and result.seconds > 0
