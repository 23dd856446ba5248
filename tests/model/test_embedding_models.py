"""Models for embeddings: their last hidden states are those of Hugging Face's classes, and gradients flow through them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.model.visible_keys import visible_ranges
from tests.helpers.architecture_runs import seen
from tests.helpers.embedding_models import CASES, EMBEDDERS, IDS, corner, direction, model, run

FOLDER = Path(__file__).parents[1] / "golden" / "embeddings"
TRUTH: dict[str, Any] = {
    f"{path.stem}-{name}": truth
    for path in FOLDER.glob("*.json")
    for name, truth in json.loads(path.read_text()).items()
}


def agrees(found: dict[str, list[float]], truth: dict[str, list[float]]) -> None:
    """Compare the norm of each gradient, and its part in a fixed direction."""
    assert found.keys() == truth.keys()
    for kind, (norm, part) in truth.items():
        assert norm > 0 and found[kind] == pytest.approx([norm, part], abs=1e-5 * norm), kind


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_hidden_states_and_gradients(arch: str, name: str, tmp_path: Path) -> None:
    truth = TRUTH[f"{arch}-{name}"]
    hidden, gradients, _ = run(*model(tmp_path, EMBEDDERS[arch][name]), [IDS])
    assert corner(hidden) == pytest.approx(truth["hidden"], abs=1e-5)
    agrees(seen(gradients), truth["gradients"])


@pytest.mark.parametrize("arch", EMBEDDERS)
def test_gradients_by_differences(arch: str, tmp_path: Path) -> None:
    """Of all weights at once, in float64."""
    h, arrays = model(tmp_path, EMBEDDERS[arch]["b"])
    arrays, random = (
        {name: array.astype(np.float64) for name, array in arrays.items()},
        np.random.default_rng(2),
    )
    way = {name: array.std() * random.standard_normal(array.shape) for name, array in arrays.items()}
    _, gradients, _ = run(h, arrays, [IDS[:15], IDS[15:24]], kernels="reference")
    ahead, behind = (
        run(
            h,
            {name: array + sign * 1e-6 * way[name] for name, array in arrays.items()},
            [IDS[:15], IDS[15:24]],
            kernels="reference",
        )[2]
        for sign in (1, -1)
    )
    slope = sum(np.vdot(gradients[name], way[name]) for name in arrays)
    assert slope == pytest.approx((ahead - behind) / 2e-6, rel=1e-5)


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_samples_of_a_row_are_apart(arch: str, name: str, tmp_path: Path) -> None:
    """Each has the hidden states and the gradients that it has in a row of its own; padding has no effect."""
    h, arrays = model(tmp_path, EMBEDDERS[arch][name])
    parts = [IDS[:3], IDS[3:25], IDS[25:]]
    packed, gradients, _ = run(h, arrays, parts, padding=5)
    apart = [run(h, arrays, [part])[0] for part in parts]
    np.testing.assert_allclose(packed, np.concatenate(apart), rtol=0, atol=2e-6)
    whole = direction(len(IDS), h.embd)
    expected = {key: np.zeros_like(array) for key, array in arrays.items()}
    for part, factors in zip(parts, np.split(whole, [3, 25]), strict=True):
        for key, each in run(h, arrays, [part], factors=factors)[1].items():
            expected[key] = expected[key] + each
    for key, each in gradients.items():
        np.testing.assert_allclose(each, expected[key], rtol=0, atol=1e-5 * np.abs(expected[key]).max())


@pytest.mark.parametrize("arch", EMBEDDERS)
def test_tokens_see_later_ones(arch: str, tmp_path: Path) -> None:
    """At a distance of half a window in each block; all of them in a block without one."""
    h, arrays = model(tmp_path, EMBEDDERS[arch]["b"])
    other = [*IDS[:-1], IDS[-1] + 1]
    change = np.abs(run(h, arrays, [IDS])[0] - run(h, arrays, [other])[0]).max(1)
    assert (change > 1e-4).all()
    half = int(h.extra["window"]) // 2
    starts, lasts = np.zeros((1, 9), np.int32), np.full((1, 9), 8, np.int32)
    ranges = visible_ranges(h, starts, lasts)
    assert half == 3 and ranges["starts.6"].tolist() == [[0, 0, 0, 0, 1, 2, 3, 4, 5]]
    assert ranges["lasts.6"].tolist() == [[3, 4, 5, 6, 7, 8, 8, 8, 8]]
    assert ranges["starts"].tolist() == starts.tolist() and ranges["lasts"].tolist() == lasts.tolist()
