"""Losses of preferences and their gradients are TRL's: as it said once, and as it says where it is installed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.preferences import CASES, Found, ours

TRUTH = json.loads(Path(__file__).parents[1].joinpath("golden", "preference_truth.json").read_text())
WAYS: dict[str, dict[str, Any]] = {
    "packed": {"pack": None, "batch": 1, "ctx": 160},
    "plain": {"flash": False, "remat": "block"},
    "numpy": {"kernels": "reference"},
}


def agrees(found: Found, truth: dict[str, Any]) -> None:
    told = found.told
    assert told["loss"] == pytest.approx(truth["loss"], rel=1e-4)
    assert told["margin"] == pytest.approx(truth["margin"], rel=1e-4, abs=1e-5)
    assert told["gradients"].keys() == truth["gradients"].keys()
    for name, pair in truth["gradients"].items():
        for mine, (norm, *parts) in zip(told["gradients"][name], pair, strict=True):
            assert norm > 0 and mine == pytest.approx([norm, *parts], abs=1e-4 * norm), name


@pytest.mark.parametrize("case", CASES)
def test_as_trl_said(case: str, tmp_path: Path) -> None:
    agrees(ours(case, tmp_path)[0], TRUTH[case])


@pytest.mark.parametrize(
    ("case", "way"),
    [("orpo", "packed"), ("dpo", "packed"), ("orpo", "plain"), ("kto", "plain"), ("simpo", "numpy")],
)
def test_as_trl_said_in_other_ways(case: str, way: str, tmp_path: Path) -> None:
    """Several pairs in a row; attention and head whole, and blocks made again; by the plain kernels."""
    agrees(ours(case, tmp_path, **WAYS[way])[0], TRUTH[case])


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_as_trl_says(case: str, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    from tests.helpers import trl_peer

    mine, batch = ours(case, tmp_path / "ours")
    theirs = trl_peer.found(case, batch, tmp_path)
    agrees(mine, theirs.told)
    agrees(theirs, TRUTH[case])
    for name, pair in theirs.gradients.items():
        for one, other in zip(mine.gradients[name], pair, strict=True):
            assert np.abs(one - other).max() <= 1e-4 * np.abs(other).max(), name
