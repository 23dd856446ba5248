"""`evaluate --compare`: losses and divergence are those of transformers' models, with and without PEFT's adapter."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.adapters import gguf
from tests.helpers import architecture_runs as runs
from tests.helpers import architecture_torch as theirs
from tests.helpers.architecture_models import shape_of, weights
from tests.helpers.cli import ran

pytestmark = [pytest.mark.reference, pytest.mark.filterwarnings("ignore")]


def log_probabilities(model: Any, tokens: list[int]) -> np.ndarray:
    logits = theirs.logits(model, tokens).astype(np.float64)
    return (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )


@pytest.mark.parametrize("arch", ["llama", "gemma2", "qwen35", "olmoe"])
def test_adapter_beside_its_base(arch: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    shape = shape_of(arch, "a")
    pairs, base = runs.factors(shape), runs.base(tmp_path, shape)
    gguf.write_adapter(tmp_path / "a.gguf", runs.adapter_of(shape, pairs))
    batch = runs.batch(tmp_path, base)
    plain = theirs.model(shape, weights(shape, last=1.0))
    before = [log_probabilities(plain, row["tokens"]) for row in batch]  # type: ignore[arg-type]
    adapted = theirs.with_adapter(plain, shape, pairs)
    after = [log_probabilities(adapted, row["tokens"]) for row in batch]  # type: ignore[arg-type]
    counted = [np.array(row["weights"]) > 0 for row in batch]
    targets = np.concatenate(
        [np.array(row["targets"])[mask] for row, mask in zip(batch, counted, strict=True)]
    )
    p, q = (
        np.concatenate([rows[mask] for rows, mask in zip(each, counted, strict=True)])
        for each in (before, after)
    )
    more = ("--ctx", runs.CTX, "--no-pack", "--lora", tmp_path / "a.gguf", "--compare", "base", "--json")
    found = json.loads(ran("evaluate", base, runs.data(tmp_path), *more).out)
    assert found["tokens"] == len(targets)
    for one, logs in ((found["base"], p), (found, q)):
        loss = -float(np.mean(logs[np.arange(len(targets)), targets]))
        assert one["loss"] == pytest.approx(loss, abs=2e-5)
        assert one["perplexity"] == pytest.approx(math.exp(loss), rel=2e-5)
    divergence = float(np.mean(np.sum(np.exp(p) * (p - q), axis=1)))
    assert divergence > 1e-3 and found["kl_divergence"] == pytest.approx(divergence, rel=1e-3, abs=1e-6)
    assert found["agreement"] == pytest.approx(np.mean(p.argmax(1) == q.argmax(1)), abs=1.5 / len(targets))
