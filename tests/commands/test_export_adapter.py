"""`llamatrain export-lora` of adapters alone: from PEFT to GGUF and back, and several as one."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import llamatrain
from llamatrain.adapters import gguf, peft
from llamatrain.adapters.read import read_adapter
from llamatrain.gguf.reader import open_gguf
from tests.helpers.adapter_files import adapter, ggla, linear, same
from tests.helpers.cli import Argument, ran, run
from tests.helpers.small_models import EMBEDDINGS, OUTPUT, small, weights, written

H = small()
NAMES = [EMBEDDINGS, *linear(H), OUTPUT]
NORM = "blk.0.attn_norm.weight"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "base.gguf", H, weights(H))
    peft.write_peft(tmp_path / "theirs", adapter(H, NAMES), "base", H)
    gguf.write_adapter("a.gguf", adapter(H, NAMES[:3], seed=2))
    (tmp_path / "old.bin").write_bytes(ggla(adapter(H, [EMBEDDINGS, NORM]), 4, 8))
    return tmp_path


def export(*words: Argument) -> str:
    return ran("export-lora", "base.gguf", *words).err


def test_from_peft_to_gguf_and_back(place: Path) -> None:
    assert "A.gguf: an adapter of 16 weights" in export(
        "--lora", "theirs", "--only-adapter", "--out", "A.gguf"
    )
    assert open_gguf("A.gguf").kind == "adapter" and same(read_adapter(Path("A.gguf"), H), adapter(H, NAMES))
    assert "back: a PEFT adapter of 16 weights" in export("--lora", "A.gguf", "--peft", "back")
    assert same(read_adapter(Path("back"), H), read_adapter(Path("theirs"), H))
    for name in (peft.WEIGHTS, peft.CONFIG):
        ours, theirs = ((place / folder / name).read_bytes() for folder in ("back", "theirs"))
        assert ours == theirs.replace(b'"base"', b'"base.gguf"')
    export("--lora", "theirs", "--only-adapter", "--type", "f16", "--out", "H.gguf")
    assert {tensor.type.name for tensor in open_gguf("H.gguf").tensors.values()} == {"F16"}


def test_several_become_one(place: Path) -> None:
    export(
        "--lora",
        "theirs",
        "--lora-scaled",
        "a.gguf",
        -0.5,
        "--lora",
        "old.bin",
        "--only-adapter",
        "--out",
        "s.gguf",
    )
    found = read_adapter(Path("s.gguf"), H)
    each = [
        (read_adapter(Path("theirs"), H), 1.0),
        (read_adapter(Path("a.gguf"), H), -0.5),
        (read_adapter(Path("old.bin"), H), 1.0),
    ]
    for name in (*NAMES, NORM):
        wanted = sum(scale * one.delta(name) for one, scale in each if name in one.pairs)
        np.testing.assert_allclose(found.delta(name), wanted, atol=1e-5)
    assert found.pairs[EMBEDDINGS].rank == 12 and found.pairs[OUTPUT].rank == 4


def test_a_bin_for_llama_cpp_and_for_peft(place: Path) -> None:
    """What the two leave out is told."""
    told = export("--lora", "old.bin", "--only-adapter", "--out", "o.gguf", "--peft", "o")
    assert (
        f"note: llama.cpp applies no pairs of norms, such as that for {NORM}, and says nothing: export-lora merges"
        in told
    )
    assert f"note: PEFT has no pairs of norms: 1 of them, such as that for {NORM}, are left out of o" in told
    assert same(read_adapter(Path("o.gguf"), H), read_adapter(Path("old.bin"), H))
    assert same(read_adapter(Path("o"), H), read_adapter(Path("old.bin"), H).without([NORM]))


def test_a_merged_model_and_a_folder_at_once(place: Path) -> None:
    export("--lora", "a.gguf", "--out", "m.gguf", "--peft", "p")
    export("--lora", "a.gguf", "--out", "n.gguf")
    assert Path("m.gguf").read_bytes() == Path("n.gguf").read_bytes() and same(
        read_adapter(Path("p"), H), read_adapter(Path("a.gguf"), H)
    )


def test_from_python(place: Path) -> None:
    made = llamatrain.export_lora("base.gguf", lora="theirs", only_adapter=True, out="A.gguf")
    assert made.path == Path("A.gguf") and made.bytes == Path("A.gguf").stat().st_size and made.tensors == 32
    assert llamatrain.export_lora("base.gguf", lora="A.gguf", peft="back").path == Path("back")


@pytest.mark.parametrize(
    ("words", "told", "code"),
    [
        (
            ("--lora", "theirs", "--only-adapter"),
            "--out is missing; name the file to write [missing-option]\n",
            2,
        ),
        (
            ("--lora", "theirs"),
            "--out is missing; name the file to write, or a folder with --peft [missing-option]",
            2,
        ),
        (("--only-adapter", "--out", "A.gguf"), "name one with --lora or --lora-scaled [no-adapter]", 2),
        (
            ("--lora", "theirs", "--peft", "theirs", "--overwrite"),
            "--peft theirs would replace an input; choose another name [replaces-input]",
            2,
        ),
        (
            ("--lora", "a.gguf", "--peft", "theirs"),
            "theirs already holds an adapter; add --overwrite to replace it [output-exists]",
            1,
        ),
        (("--lora", "a.gguf", "--peft", "base.gguf"), "base.gguf: cannot be created: ", 1),
        (
            ("--lora", "a.gguf", "--only-adapter", "--out", "a.gguf", "--overwrite"),
            "--out a.gguf would replace the input a.gguf; choose another name [replaces-input]",
            2,
        ),
        (
            ("--lora", "theirs", "--only-adapter", "--out", "a.gguf"),
            "a.gguf exists already; add --overwrite to replace it [output-exists]",
            1,
        ),
        (
            ("--lora", "theirs", "--only-adapter", "--out", "A.gguf", "--type", "q8_0"),
            "--type of an adapter must be f32 or f16 (got q8_0) [invalid-option]",
            2,
        ),
        (
            ("--lora", "a.gguf", "--peft", "p", "--type", "f16"),
            "--type of an adapter must be f32 for PEFT (got f16) [invalid-option]",
            2,
        ),
        (
            ("--lora", "a.gguf", "--peft", "p", "--check", "x"),
            "--check has no effect if no model is written; leave it out [unused-option]",
            2,
        ),
        (("--lora", "wide.gguf", "--only-adapter", "--out", "A.gguf"), "is for another base", 1),
    ],
)
def test_what_is_refused(place: Path, words: tuple[Argument, ...], told: str, code: int) -> None:
    gguf.write_adapter("wide.gguf", adapter(small(embd=128), [NAMES[1]]))
    there = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    done = run("export-lora", "base.gguf", *words)
    assert done.code == code and told in done.err and done.err.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == there


def test_norms_alone_are_nothing_for_peft(place: Path) -> None:
    made = replace(adapter(H, [NORM]))
    (place / "n.bin").write_bytes(ggla(made, 4, 8))
    done = run("export-lora", "base.gguf", "--lora", "n.bin", "--peft", "p")
    assert done.code == 1 and "p: cannot be written: " in done.err and "[only-norm-pairs]" in done.err
    assert not (place / "p").exists() and json.loads((place / "theirs" / peft.CONFIG).read_text())["r"] == 4
