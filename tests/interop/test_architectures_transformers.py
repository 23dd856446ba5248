"""The golden values of `tests/model/test_architecture_truth.py` still equal transformers and PEFT."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import architecture_runs as runs
from tests.helpers import architecture_torch as theirs
from tests.helpers.architecture_models import CASES, SHAPES, shape_of, weights
from tests.model.test_architecture_truth import BATCH, TRUTH, agrees

# On other processors torch adds in another order; after 20 steps of this model, losses differ by up to 1e-4.
SAME_STEPS = {"gemma3n-a": 20}

pytestmark = [pytest.mark.reference, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Such small sums are slower with more."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_as_they_say(arch: str, name: str) -> None:
    told, truth = theirs.told(shape_of(arch, name), BATCH), TRUTH[f"{arch}-{name}"]
    steps = SAME_STEPS.get(f"{arch}-{name}")
    assert told["logits"] == pytest.approx(truth["logits"], abs=2e-5)
    for part in ("losses", "lora_losses"):
        assert told[part][:steps] == pytest.approx(truth[part][:steps], abs=2e-5), part
        assert told[part] == pytest.approx(truth[part], abs=2e-4), part
    for part in ("gradients", "lora_gradients"):
        agrees(told[part], truth[part])


def apart(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("arch", SHAPES)
def test_each_gradient(arch: str, tmp_path: Path) -> None:
    shape, pairs = shape_of(arch, "a"), runs.factors(shape_of(arch, "a"))
    batch, calm = BATCH, weights(shape_of(arch, "a"), last=1.0)
    found = runs.full_gradients(tmp_path, shape)
    for name, expected in theirs.gradients(theirs.model(shape, calm), shape, batch).items():
        assert apart(found[name], expected) <= 1e-5, name
    lora, held = (
        runs.lora_gradients(tmp_path, shape),
        theirs.with_adapter(theirs.model(shape, calm), shape, pairs),
    )
    for name, expected_pair in theirs.lora_gradients(held, shape, batch, pairs).items():
        for half, mine, expected in zip("ab", lora[name], expected_pair, strict=True):
            assert apart(mine, expected) <= 1e-5, f"{half} of {name}"
