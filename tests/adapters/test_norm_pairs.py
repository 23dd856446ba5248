"""Adapters with pairs for norms, as llama.cpp's old finetune made all of its own: beside a model they do what they do merged."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llamatrain.adapters import gguf
from llamatrain.adapters.read import read_adapter
from llamatrain.gguf.reader import open_gguf
from tests.helpers.adapter_files import adapter, ggla, same
from tests.helpers.cli import Argument, losses, ran, run, same_bits, text_file
from tests.helpers.lora_runs import base, deltas
from tests.helpers.small_models import EMBEDDINGS, small
from tests.helpers.test_data import material

H = small()
NORMS = [name for name, shape in H.shapes.items() if len(shape) == 1]
NAMES = [EMBEDDINGS, "blk.0.attn_q.weight", *NORMS]
ROWS = ("--ctx", 32, "--batch", 4, "--precision", "f32", "--lr", 1e-2)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path, 2000)
    base(tmp_path / "base.gguf", H)
    pairs = adapter(H, NAMES).pairs | adapter(H, ["output_norm.weight"], rank=1).pairs
    made = replace(adapter(H, ()), pairs={name: replace(pair, scale=2.0) for name, pair in pairs.items()})
    (tmp_path / "old.bin").write_bytes(ggla(made, 4, 8))
    ran("export-lora", "base.gguf", "--lora", "old.bin", "--out", "merged.gguf")
    return tmp_path


def evaluated(*arguments: Argument) -> float:
    return float(json.loads(ran("evaluate", *arguments, "--precision", "f32", "--json").out)["loss"])


def finetuned(out: str, *more: Argument, model: str = "base.gguf", iters: int = 3) -> Path:
    ran("finetune", model, "text.txt", *ROWS, "--iters", iters, *more, "--out", out)
    return Path(out)


def test_evaluate_with_it_equals_evaluate_of_the_export(place: Path) -> None:
    data = ("text.txt", "--ctx", 32)
    with_it, merged = evaluated("base.gguf", *data, "--lora", "old.bin"), evaluated("merged.gguf", *data)
    assert with_it == pytest.approx(merged, abs=1e-4)
    matrices = replace(
        read_adapter(place / "old.bin", H),
        pairs={name: read_adapter(place / "old.bin", H).pairs[name] for name in NAMES[:2]},
    )
    gguf.write_adapter("matrices.gguf", matrices)
    assert abs(with_it - evaluated("base.gguf", *data, "--lora", "matrices.gguf")) > 1e-2
    half, other = (
        evaluated("base.gguf", *data, "--lora-scaled", "old.bin", scale) for scale in ("0.5", "-0.5")
    )
    assert len({round(each, 3) for each in (half, other, with_it)}) == 3


def test_the_ancestors_own_file() -> None:
    model, lora = material("ancestors/model.gguf"), material("ancestors/lora.bin")
    said = ("--prompt", "the", "--temp", 0, "-n", 12)
    found = ran("generate", model, "--lora", lora, *said).out
    assert (
        found
        == ran("generate", material("ancestors/merged-by-ancestor.gguf"), *said).out
        != ran("generate", model, *said).out
    )


def test_generate_with_it_is_generate_of_the_export(place: Path) -> None:
    said = ("--prompt", "Once", "--temp", 0, "-n", 24)
    with_it = ran("generate", "base.gguf", "--lora", "old.bin", *said).out
    assert with_it == ran("generate", "merged.gguf", *said).out != ran("generate", "base.gguf", *said).out


def test_beside_a_new_adapter(place: Path) -> None:
    """It counts in the losses and is not in the file that is written."""
    found, merged = (
        finetuned("run", "--lora", "old.bin", iters=5),
        finetuned("merged", model="merged.gguf", iters=5),
    )
    assert losses(found) == pytest.approx(losses(merged), abs=1e-4)
    one, other = deltas(found / "adapter.gguf"), deltas(merged / "adapter.gguf")
    assert one.keys() == other.keys() and not any("norm" in name for name in one)
    for name, delta in one.items():
        assert np.linalg.norm(delta - other[name]) <= 2e-2 * np.linalg.norm(other[name]), name


def test_going_on_from_it(place: Path) -> None:
    """All of it is trained on, and all of it written."""
    kept = finetuned("kept", "--lora-init", "old.bin", iters=0)
    first, found = read_adapter(place / "old.bin", H), read_adapter(kept / "adapter.gguf", H)
    assert found.pairs.keys() == first.pairs.keys()
    for name, pair in first.pairs.items():
        np.testing.assert_allclose(found.delta(name), first.delta(name), rtol=1e-5, atol=1e-7)
        assert found.pairs[name].rank == pair.rank
    started = losses(finetuned("on", "--lora-init", "old.bin", "--batch", 63, iters=1))[0]
    assert started == pytest.approx(
        evaluated("base.gguf", "text.txt", "--ctx", 32, "--lora", "old.bin"), abs=1e-4
    )
    trained = finetuned(
        "trained", "--lora-init", "old.bin", "--sample-every", 2, "--sample-prompt", "a", iters=4
    )
    after = read_adapter(trained / "adapter.gguf", H)
    assert all(np.abs(after.delta(name) - first.delta(name)).max() > 1e-4 for name in first.pairs)
    ended = losses(trained)
    assert ended[-1] < ended[0]


def test_such_a_run_goes_on(place: Path) -> None:
    finetuned("half", "--lora-init", "old.bin", "--decay-steps", 4, "--warmup", 0, iters=2)
    ran("finetune", "--resume", "half", "--iters", 4)
    other = finetuned("other", "--lora-init", "old.bin", "--decay-steps", 4, "--warmup", 0, iters=4)
    same_bits(Path("half") / "adapter.gguf", other / "adapter.gguf")


def test_the_file_says_that_llama_cpp_leaves_norms_out(place: Path) -> None:
    done = ran(
        "finetune", "base.gguf", "text.txt", *ROWS, "--iters", 0, "--lora-init", "old.bin", "--out", "run"
    )
    line = "note: llama.cpp applies no pairs of norms, such as that for blk.0.attn_norm.weight, and says nothing: "
    assert line + "export-lora merges them" in done.err
    found = open_gguf("run/adapter.gguf")
    assert found.tensors["output_norm.weight.lora_a"].shape == (1, 64)
    assert found.tensors["output_norm.weight.lora_b"].shape == (1, 1)
    assert found.metadata["general.description"] == line.removeprefix("note: ") + "export-lora merges them"
    ran("export-lora", "base.gguf", "--lora", "run/adapter.gguf", "--out", "m.gguf")
    one, other = (evaluated(name, "text.txt", "--ctx", 32) for name in ("m.gguf", "merged.gguf"))
    assert one == pytest.approx(other, abs=1e-5)
    gguf.write_adapter("plain.gguf", adapter(H, NAMES[:2]))
    assert "general.description" not in open_gguf("plain.gguf").metadata


def test_there_and_back(tmp_path: Path) -> None:
    made = adapter(H, NAMES)
    gguf.write_adapter(tmp_path / "a.gguf", made)
    assert same(read_adapter(tmp_path / "a.gguf", H), made)


def test_peft_has_none(place: Path) -> None:
    """That is told, and the rest is written."""
    done = ran(
        "finetune",
        "base.gguf",
        "text.txt",
        *ROWS,
        "--iters",
        0,
        "--lora-init",
        "old.bin",
        "--peft",
        "p",
        "--out",
        "run",
    )
    left = "note: PEFT has no pairs of norms: 5 of them, such as that for blk.0.attn_norm.weight, are left out of "
    assert f"{left}{place}/p\n" in done.err
    found = read_adapter(place / "p", H)
    assert list(found.pairs) == NAMES[:2]


def test_norms_alone_are_no_adapter_for_peft(place: Path) -> None:
    (place / "norms.bin").write_bytes(ggla(adapter(H, NORMS), 4, 8))
    done = run(
        "finetune", "base.gguf", "text.txt", *ROWS, "--lora-init", "norms.bin", "--peft", "p", "--out", "run"
    )
    assert done.code == 1 and "[only-norm-pairs]" in done.err
    assert not (place / "p").exists() and not (place / "run").exists()


def test_trained_in_bf16(place: Path) -> None:
    half = losses(
        finetuned("half", "--lora-init", "old.bin", "--precision", "bf16", "--remat", "block", iters=8)
    )
    full = losses(finetuned("full", "--lora-init", "old.bin", iters=8))
    assert half == pytest.approx(full, abs=5e-2) and np.mean(half[-2:]) < half[0] - 0.05
