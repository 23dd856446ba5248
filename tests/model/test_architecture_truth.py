"""Every architecture says and learns what Hugging Face's class of it said once: logits, gradients, losses of a run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.gguf.reader import open_gguf
from llamatrain.sample.decoder import Decoder
from tests.helpers import architecture_runs as runs
from tests.helpers.architecture_family import CTX
from tests.helpers.architecture_models import BASIC, CASES, SHAPES, prompt, shape_of, weights, written
from tests.helpers.small_models import loaded

FOLDER = Path(__file__).parents[1] / "golden" / "architectures"
BATCH = json.loads((FOLDER / "batch.json").read_text())
TRUTH: dict[str, Any] = {
    f"{path.stem}-{name}": truth
    for path in FOLDER.glob("*.json")
    if path.stem != "batch"
    for name, truth in json.loads(path.read_text()).items()
}
# tests run by default on one shape of each, and the longer ones on those of which others are variants
ONE = [
    pytest.param(arch, name, id=f"{arch}-{name}", marks=[] if name == "b" else pytest.mark.slow)
    for arch, name in CASES
]
TYPICAL = [
    pytest.param(
        arch, name, id=f"{arch}-{name}", marks=[] if name == "b" and arch in BASIC else pytest.mark.slow
    )
    for arch, name in CASES
]
OTHER_WAYS = (
    "cohere2",
    "gemma2",
    "gemma3",
    "gemma3n",
    "lfm2",
    "mistral3",
    "phi3",
    "qwen2",
    "qwen35",
    "stablelm",
    "starcoder2",
)


def agrees(found: dict[str, list[float]], truth: dict[str, list[float]]) -> None:
    assert found.keys() == truth.keys()
    for kind, (norm, part) in truth.items():
        assert norm > 0 and found[kind] == pytest.approx([norm, part], abs=3e-5 * norm), kind


def test_rows(tmp_path: Path) -> None:
    """Those that the truth was made of."""
    assert runs.batch(tmp_path, runs.base(tmp_path, shape_of("llama", "a"))) == BATCH
    assert TRUTH.keys() == {f"{arch}-{name}" for arch, name in CASES} and len(CASES) == 3 * len(SHAPES)


@pytest.mark.parametrize(("arch", "name"), ONE)
def test_logits(arch: str, name: str, tmp_path: Path) -> None:
    """Token by token, from a cache."""
    shape = shape_of(arch, name)
    h, arrays = loaded(open_gguf(written(tmp_path / "model.gguf", shape, weights(shape))))
    decoder = Decoder(h, arrays, ctx=CTX)
    found = np.array([decoder.feed([token]).copy() for token in prompt()])
    assert runs.corner(found) == pytest.approx(TRUTH[f"{arch}-{name}"]["logits"], abs=1e-5)


@pytest.mark.parametrize(("arch", "name"), ONE)
def test_full_training(arch: str, name: str, tmp_path: Path) -> None:
    shape, truth = shape_of(arch, name), TRUTH[f"{arch}-{name}"]
    agrees(runs.seen(runs.full_gradients(tmp_path, shape)), truth["gradients"])
    assert runs.full_losses(tmp_path, shape) == pytest.approx(truth["losses"], abs=1e-5)
    assert truth["losses"][-1] < truth["losses"][0] - 0.3


@pytest.mark.parametrize(("arch", "name"), ONE)
def test_lora_gradients(arch: str, name: str, tmp_path: Path) -> None:
    found = runs.halves(runs.lora_gradients(tmp_path, shape_of(arch, name)))
    agrees(runs.seen(found), TRUTH[f"{arch}-{name}"]["lora_gradients"])


@pytest.mark.parametrize(("arch", "name"), TYPICAL)
def test_lora_losses(arch: str, name: str, tmp_path: Path) -> None:
    truth = TRUTH[f"{arch}-{name}"]["lora_losses"]
    assert runs.lora_losses(tmp_path, shape_of(arch, name)) == pytest.approx(truth, abs=1e-5)


@pytest.mark.parametrize(("arch", "name"), TYPICAL)
def test_losses_in_bf16(arch: str, name: str, tmp_path: Path) -> None:
    shape, truth = shape_of(arch, name), TRUTH[f"{arch}-{name}"]
    assert runs.full_losses(tmp_path, shape, "bf16") == pytest.approx(truth["losses"], abs=2e-2)
    assert runs.lora_losses(tmp_path, shape, "bf16") == pytest.approx(truth["lora_losses"], abs=2e-2)


@pytest.mark.parametrize(
    "more", [("--remat", "block"), ("--no-flash",)], ids=["recomputed", "plain attention"]
)
@pytest.mark.parametrize(
    ("arch", "name"),
    [*((arch, "b") for arch in OTHER_WAYS), ("gemma4", "a")],
)
def test_gradients_in_other_ways(arch: str, name: str, more: tuple[str, ...], tmp_path: Path) -> None:
    found = runs.seen(runs.full_gradients(tmp_path, shape_of(arch, name), *more))
    agrees(found, TRUTH[f"{arch}-{name}"]["gradients"])
