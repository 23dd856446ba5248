"""Merged models and extracted adapters in llama.cpp itself: it loads them, and finds the same probabilities."""

from pathlib import Path

import numpy as np
import pytest

from llamatrain.adapters import gguf
from llamatrain.gguf.reader import open_gguf
from llamatrain.sample.decoder import Decoder
from tests.helpers.adapter_files import adapter, linear
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


def test_an_extracted_adapter(tmp_path: Path) -> None:
    """The base with the adapter finds the same as the model that it was extracted from."""
    base = written(tmp_path / "base.gguf", H, weights(H))
    gguf.write_adapter(tmp_path / "made.gguf", adapter(H, linear(H)))
    tuned, extracted = tmp_path / "tuned.gguf", tmp_path / "extracted.gguf"
    ran("export-lora", base, "--lora", tmp_path / "made.gguf", "--out", tuned)
    ran("extract-lora", base, tuned, "--lora-r", 4, "--out", extracted)
    with served(tuned) as server:
        follow, expected = letters(server, IDS)
    with served(base, adapter=extracted) as server:
        same, found = letters(server, IDS)
    with served(base) as server:
        plain = letters(server, IDS, count=1)[1]
    known = np.isfinite(expected) & np.isfinite(found)
    assert follow == same and known.mean() > 0.2
    assert np.abs(found - expected)[known].max() <= 2e-3 < 0.3 < np.nanmax(np.abs(plain[0] - expected[0]))
