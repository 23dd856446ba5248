"""Merged models in llama.cpp itself: it loads them, and finds the same probabilities."""

from pathlib import Path

import numpy as np
import pytest

from llamatrain.gguf.reader import open_gguf
from llamatrain.sample.decoder import Decoder
from tests.helpers.cli import ran
from tests.helpers.llama_cpp import served
from tests.helpers.small_models import loaded, small, tokens, weights, written
from tests.interop.test_architectures_llama_cpp import letters, said

pytestmark = pytest.mark.llama_cpp

H = small(embd=256, heads=4, head_size=64, ff=256, layers=2)
IDS = tokens(20)


@pytest.mark.parametrize(("method", "kind"), [("slerp", "keep"), ("ties", "keep"), ("linear", "f16")])
def test_probabilities(tmp_path: Path, method: str, kind: str) -> None:
    for seed, name in enumerate(("base", "a", "b"), 1):
        written(tmp_path / f"{name}.gguf", H, weights(H, seed))
    base = ("--base", tmp_path / "base.gguf") if method == "ties" else ()
    merged, models = tmp_path / "m.gguf", (tmp_path / "a.gguf", tmp_path / "b.gguf")
    ran("merge", *models, "--method", method, *base, "--type", kind, "--out", merged)
    with served(merged) as server:
        follow, found = letters(server, IDS)
    expected = said(Decoder(*loaded(open_gguf(merged)), ctx=64), IDS, follow)
    limit = 2e-3 if kind == "keep" else 2e-2  # it rounds what meets half floats to such
    found = found[:, : H.vocab]
    known = np.isfinite(found)
    assert known.mean() > 0.2 and np.abs(found - expected)[known].max() <= limit
