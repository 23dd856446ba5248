"""What `finetune` writes in llama.cpp itself: the logits of base and adapter are those that were trained."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from llamatrain.adapters import gguf
from llamatrain.adapters.read import read_adapter
from llamatrain.gguf.reader import open_gguf
from llamatrain.sample.decoder import Decoder
from tests.helpers.adapter_files import merged
from tests.helpers.cli import Argument, ran, rows, text_file
from tests.helpers.lora_runs import base, decoded
from tests.helpers.small_models import loaded, small, tokens
from tests.interop.test_adapters_llama_cpp import of_llama_cpp

pytestmark = pytest.mark.llama_cpp

H = small(embd=256, heads=4, head_size=64, ff=256, layers=2)
IDS = tokens(40)
CTX = 32


def trained(folder: Path, kind: str, *more: Argument) -> tuple[Path, Path]:
    """A base, and an adapter of it that has learned enough to be told from none."""
    model, data = base(folder / "base.gguf", H, kind), text_file(folder)
    given = ("--ctx", CTX, "--batch", 8, "--lr", 1e-2, "--iters", 40, "--lora-alpha", 16, *more)
    ran("finetune", model, data, *given, "--out", folder / "run")
    return model, folder / "run" / "adapter.gguf"


def ours(model: Path, adapter: Path, scale: float = 1.0) -> np.ndarray:
    h, arrays = loaded(open_gguf(model))
    decoder = Decoder(h, merged(arrays, [read_adapter(adapter, h).scale_by(scale)]), ctx=64)
    return np.array([decoder.feed([token]).copy() for token in IDS])


def loss_of(*arguments: Argument) -> float:
    return float(
        json.loads(ran("evaluate", *arguments, "--ctx", CTX, "--precision", "f32", "--json").out)["loss"]
    )


@pytest.mark.parametrize(
    ("more", "limit"),
    [
        ((), 2e-3),
        (("--adapter-type", "f16"), 1e-2),  # llama.cpp rounds what meets half floats to such
        (("--rslora", "--rank", "attn_q=16", "--rank", "ffn_down=3"), 2e-3),
        (("--target", "token_embd", "--target", "attn_v", "--target", "output"), 2e-3),
    ],
)
def test_logits(tmp_path: Path, more: tuple[Argument, ...], limit: float) -> None:
    model, adapter = trained(tmp_path, "F32", *more)
    expected, plain = of_llama_cpp(model, lora_path=os.fspath(adapter)), of_llama_cpp(model)
    assert np.abs(ours(model, adapter) - expected).max() <= limit < 0.3 < np.abs(plain - expected).max()
    half = of_llama_cpp(model, lora_path=os.fspath(adapter), lora_scale=0.5)
    assert np.abs(ours(model, adapter, 0.5) - half).max() <= limit < np.abs(expected - half).max()
    assert np.array_equal(of_llama_cpp(model, lora_path=os.fspath(adapter), lora_scale=0.0), plain)


def test_pairs_of_norms_are_left_out(tmp_path: Path) -> None:
    """The file is loaded; all else in it counts."""
    model, adapter = trained(tmp_path, "F32", "--target", "norms,attn_v,output")
    found = read_adapter(adapter, H)
    assert len(found.norm_names) == 2 * H.layers + 1
    gguf.write_adapter(tmp_path / "without.gguf", found.without(found.norm_names))
    one, other = (
        of_llama_cpp(model, lora_path=os.fspath(path)) for path in (adapter, tmp_path / "without.gguf")
    )
    assert np.array_equal(one, other)
    assert np.abs(ours(model, adapter) - one).max() > 0.01


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q4_K"])
def test_logits_of_other_bases(tmp_path: Path, kind: str) -> None:
    """llama.cpp rounds activations there; it is no further from us than from itself on the weights as floats."""
    model, adapter = trained(tmp_path, kind)
    floats = base(tmp_path / "floats.gguf", H, arrays=decoded(model))
    theirs, exact = (of_llama_cpp(each, lora_path=os.fspath(adapter)) for each in (model, floats))
    mine, plain = ours(model, adapter), of_llama_cpp(model)
    assert (
        np.abs(mine - theirs).mean()
        <= 1.2 * np.abs(exact - theirs).mean()
        < 0.1 * np.abs(plain - theirs).mean()
    )
    assert np.abs(mine - exact).max() <= 2e-3


@pytest.mark.parametrize("kind", ["Q4_K", "Q4_0"])
def test_what_export_keeps_in_the_types_of_the_base(tmp_path: Path, kind: str) -> None:
    """llama.cpp loads it, and has its logits: as far from ours as its own are on the same weights as floats."""
    model, adapter = trained(tmp_path, kind)
    ran("export-lora", model, "--lora", adapter, "--out", tmp_path / "kept.gguf")
    kept = open_gguf(tmp_path / "kept.gguf")
    assert {t.type.name for t in kept.tensors.values()} == {kind, "F32"}
    floats = base(tmp_path / "floats.gguf", H, arrays=decoded(kept.path))
    theirs, exact, plain = (of_llama_cpp(each) for each in (kept.path, floats, model))
    h, arrays = loaded(kept)
    decoder = Decoder(h, arrays, ctx=64)
    mine = np.array([decoder.feed([token]).copy() for token in IDS])
    assert (
        np.abs(mine - theirs).mean()
        <= 1.2 * np.abs(exact - theirs).mean()
        < 0.2 * np.abs(plain - theirs).mean()
    )


@pytest.mark.parametrize("kind", ["F32", "Q4_0"])
def test_the_loss_is_the_one_of_llama_cpp(tmp_path: Path, kind: str) -> None:
    """Of `evaluate` on base and adapter, over some rows."""
    llama_cpp = pytest.importorskip("llama_cpp")
    model, adapter = trained(tmp_path, kind)
    data = tmp_path / "few.txt"
    data.write_text((tmp_path / "text.txt").read_text()[: 10 * CTX])
    unset = {f"yarn_{key}": -1.0 for key in ("ext_factor", "attn_factor", "beta_fast", "beta_slow")}
    fixed = {
        "n_ctx": 64,
        "logits_all": True,
        "type_k": 0,
        "type_v": 0,
        "n_threads": 1,
        "verbose": False,
        **unset,
    }
    witness = llama_cpp.Llama(os.fspath(model), lora_path=os.fspath(adapter), **fixed)
    total, count = 0.0, 0.0
    for row in rows(10, data, "--model", model, "--ctx", CTX):
        witness.reset()
        witness.eval(row["tokens"].tolist())
        scores = np.array(witness.scores[: len(row["tokens"])], np.float64)
        each = np.log(np.exp(scores).sum(-1)) - scores[np.arange(len(scores)), row["targets"]]
        total, count = total + float((each * row["weights"]).sum()), count + float(row["weights"].sum())
    witness.close()
    found, plain = loss_of(model, data, "--lora", adapter), loss_of(model, data)
    assert found == pytest.approx(total / count, abs=1e-3 if kind == "F32" else 2e-2) and found < plain - 0.1
