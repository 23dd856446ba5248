"""Merged models, extracted adapters and control vectors beside llama.cpp itself: it finds the same probabilities."""

from pathlib import Path

import numpy as np
import pytest

from llamatrain.adapters import gguf
from llamatrain.adapters.control_vector import add_directions, load_control_vectors, write_control_vector
from llamatrain.adapters.load_adapted import load_with_adapters
from llamatrain.adapters.options import AdapterOptions, ControlOptions
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


def test_a_control_vector(tmp_path: Path) -> None:
    """The server takes none. In a llama, biases of the feed-forward parts have the same effect, and it takes these."""
    random = np.random.default_rng(5)
    plain = written(tmp_path / "plain.gguf", H, weights(H))
    directions = {1: random.standard_normal(H.embd, np.float32)}
    write_control_vector(tmp_path / "vector.gguf", directions, H)
    h = small(
        embd=256,
        heads=4,
        head_size=64,
        ff=256,
        layers=2,
        optional_weights=frozenset({"blk.{}.ffn_down.bias"}),
    )
    biases = {f"blk.{layer}.ffn_down.bias": np.zeros(H.embd, np.float32) for layer in range(H.layers)}
    biases["blk.1.ffn_down.bias"] = 2 * directions[1]
    with served(written(tmp_path / "biased.gguf", h, weights(H) | biases)) as server:
        follow, found = letters(server, IDS)
    base, leaves, arrays = load_with_adapters(open_gguf(plain), AdapterOptions(), 1)
    vector = load_control_vectors(
        ControlOptions(control_vector_scaled=((tmp_path / "vector.gguf", 2.0),)), base
    )
    leaves, arrays = add_directions(leaves, arrays, vector)
    expected = said(Decoder(base, arrays, ctx=64, weights=leaves), IDS, follow)
    without = said(Decoder(*loaded(open_gguf(plain)), ctx=64), IDS, follow)
    found = found[:, : H.vocab]
    known = np.isfinite(found)
    assert known.mean() > 0.2 and np.abs(found - expected)[known].max() <= 2e-3
    assert np.abs(found - without)[known].max() > 0.3
