"""`llamatrain export-lora`: what is in the merged file, and what is refused before one is begun."""

import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from llamatrain.adapters import gguf, peft
from llamatrain.adapters.read import read_adapter
from llamatrain.gguf import quants, rewrite
from llamatrain.gguf.reader import Gguf, open_gguf
from llamatrain.gguf.types import TensorInfo, type_by_name
from llamatrain.gguf.values import f32, string, u32
from llamatrain.gguf.writer import create_gguf
from tests.helpers.adapter_files import adapter, ggla, linear
from tests.helpers.cli import TINY, Done, ran, run, text_file
from tests.helpers.small_models import EMBEDDINGS, OUTPUT, small, weights, written
from tests.helpers.test_data import material

H = small()
WIDE = small(embd=256, heads=4, head_size=64, ff=512, layers=1)  # rows that K-quants can hold
Q, NORM = "blk.0.attn_q.weight", "blk.0.attn_norm.weight"
TYPES = (
    "f32",
    "f16",
    "bf16",
    "q8_0",
    "q6_k",
    "q5_k",
    "q4_k",
    "q3_k",
    "q2_k",
    "q5_1",
    "q5_0",
    "q4_1",
    "q4_0",
    "iq4_nl",
    "iq4_xs",
)


def files(
    folder: Path, h: object = H, kind: str = "F32", names: tuple[str, ...] = (Q, EMBEDDINGS)
) -> tuple[Path, Path]:
    gguf.write_adapter(folder / "a.gguf", adapter(h, names))  # type: ignore[arg-type]
    return written(folder / "base.gguf", h, weights(h), kind), folder / "a.gguf"  # type: ignore[arg-type]


def values(file: Gguf, name: str) -> np.ndarray:
    tensor = file.tensors[name]
    return quants.decode(tensor.raw, tensor.type).reshape(tensor.shape)


def rms(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(array, dtype=np.float64))))


def failed(done: Done, told: str, code: int = 1) -> None:
    assert done.code == code and len(done.errors) == 1 and told in done.errors[0], done.err
    assert "Traceback" not in done.err


# ---- what is in the file ---------------------------------------------------


def test_as_the_ancestor_merged(tmp_path: Path) -> None:
    base, lora = material("ancestors/model.gguf"), material("ancestors/lora.bin")
    ran("export-lora", base, "--lora", lora, "--out", tmp_path / "m.gguf")
    found, expected = open_gguf(tmp_path / "m.gguf"), open_gguf(material("ancestors/merged-by-ancestor.gguf"))
    assert list(found.tensors) == list(expected.tensors) and list(found.metadata) == list(expected.metadata)
    assert all(
        bytes(found.metadata.raw_values[key].raw) == bytes(value.raw)
        for key, value in expected.metadata.raw_values.items()
    )
    for name in expected.tensors:
        assert np.abs(values(found, name) - values(expected, name)).max() < 1e-7


@pytest.mark.parametrize("panel", [rewrite.PANEL, 700])
def test_several_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, panel: int) -> None:
    """Of other kinds, with other weights and scales; one of them twice, one with a scale of 0. In panels of several sizes."""
    monkeypatch.setattr(rewrite, "PANEL", panel)
    base, one = files(tmp_path)
    other = adapter(H, (Q, NORM, "blk.1.ffn_up.weight"), seed=2)
    (tmp_path / "b.bin").write_bytes(ggla(other, 4, 8))
    gguf.write_adapter(tmp_path / "none.gguf", adapter(H, ("blk.1.ffn_down.weight",)))
    scaled = (
        "--lora-scaled",
        tmp_path / "b.bin",
        -0.5,
        "--lora-scaled",
        one,
        0.25,
        "--lora-scaled",
        tmp_path / "none.gguf",
        0,
    )
    done = ran("export-lora", base, "--lora", one, *scaled, "--out", tmp_path / "m.gguf")
    assert (
        re.search(r"m\.gguf: [\d.]+ kB, 4 of 21 tensors merged, 17 copied unchanged\n$", done.err)
        and not done.out
    )
    found, plain, first = open_gguf(tmp_path / "m.gguf"), open_gguf(base), adapter(H, (Q, EMBEDDINGS))
    changes = {
        Q: 1.25 * first.delta(Q) - 0.5 * other.delta(Q),
        EMBEDDINGS: 1.25 * first.delta(EMBEDDINGS),
        NORM: -0.5 * other.delta(NORM)[0],
        "blk.1.ffn_up.weight": -0.5 * other.delta("blk.1.ffn_up.weight"),
    }
    for name, tensor in plain.tensors.items():
        if name in changes:
            assert np.abs(values(found, name) - values(plain, name) - changes[name]).max() < 1e-5, name
        else:
            assert np.array_equal(found.tensors[name].raw, tensor.raw), name
    assert dict(found.metadata.raw_values) == dict(plain.metadata.raw_values)


@pytest.mark.parametrize("kind", TYPES)
def test_keep(tmp_path: Path, kind: str) -> None:
    """What is touched is rounded once more and no worse; what is not keeps its bytes."""
    names = tuple(name for name in linear(WIDE) if "ffn_up" not in name)
    base, lora = files(tmp_path, WIDE, kind.upper(), names)
    ran("export-lora", base, "--lora", lora, "--out", tmp_path / "m.gguf")
    found, plain, made = open_gguf(tmp_path / "m.gguf"), open_gguf(base), read_adapter(lora, H)
    for name, tensor in plain.tensors.items():
        assert found.tensors[name].type is tensor.type
        if name not in names:
            assert np.array_equal(found.tensors[name].raw, tensor.raw)
            continue
        wanted = values(plain, name) + made.delta(name)
        rounded = quants.decode(quants.encode(wanted, tensor.type), tensor.type)
        assert rms(values(found, name) - wanted) <= 1.0001 * rms(rounded - wanted)
        assert rms(values(found, name) - wanted) < rms(made.delta(name))
    assert {
        key: bytes(value.raw)
        for key, value in found.metadata.raw_values.items()
        if key != "general.quantization_version"
    } == {key: bytes(value.raw) for key, value in plain.metadata.raw_values.items()}
    assert found.metadata.get("general.quantization_version") == (
        None if kind in ("f32", "f16", "bf16") else 2
    )


@pytest.mark.parametrize(
    ("kind", "number"), [*zip(TYPES, (0, 1, 32, 7, 18, 16, 14, 11, 10, 9, 8, 3, 2, 25, 30), strict=True)]
)
def test_another_type(tmp_path: Path, kind: str, number: int) -> None:
    base, lora = files(tmp_path, WIDE, "Q8_0", (Q,))
    ran("export-lora", base, "--lora", lora, "--type", kind, "--out", tmp_path / "m.gguf")
    found, plain, made = open_gguf(tmp_path / "m.gguf"), open_gguf(base), read_adapter(lora, H)
    assert found.metadata["general.file_type"] == number
    for name, tensor in found.tensors.items():
        assert tensor.type.name == (kind.upper() if len(tensor.shape) == 2 else "F32")
        wanted = values(plain, name) + (made.delta(name) if name == Q else np.float32(0))
        assert np.array_equal(tensor.raw.reshape(-1), quants.encode(wanted, tensor.type).reshape(-1)), name


@pytest.mark.parametrize("kind", TYPES)
def test_a_type_alone_converts_a_model(tmp_path: Path, kind: str) -> None:
    base, _ = files(tmp_path, WIDE, "F32")
    done = ran("export-lora", base, "--type", kind, "--out", tmp_path / "m.gguf")
    found, plain = open_gguf(tmp_path / "m.gguf"), open_gguf(base)
    for name, tensor in found.tensors.items():
        assert tensor.type.name == (kind.upper() if len(tensor.shape) == 2 else "F32")
        assert np.array_equal(
            tensor.raw.reshape(-1), quants.encode(values(plain, name), tensor.type).reshape(-1)
        ), name
    converted = sum(len(tensor.shape) == 2 for tensor in plain.tensors.values()) if kind != "f32" else 0
    assert (
        f"{converted} of {len(plain.tensors)} tensors converted to {kind}, " in done.err
        and "merged" not in done.err
    )


def test_a_model_trained_from_scratch_is_quantised(tmp_path: Path) -> None:
    ran(
        "from-scratch",
        text_file(tmp_path),
        *TINY,
        "--iters",
        2,
        "--batch",
        2,
        "--ctx",
        32,
        "--out",
        tmp_path / "run",
    )
    model, made = tmp_path / "run" / "model.gguf", tmp_path / "m.gguf"
    hint = run("quantize", model).errors[0].partition("; use ")[2].removesuffix(" [unknown-command]")
    assert hint.startswith("export-lora MODEL.gguf --type q8_0 ")
    words = hint.replace("MODEL.gguf", str(model)).replace("NEW.gguf", str(made)).split()
    assert (
        "verdict" in ran(*words, "--check", "some text").out
        and open_gguf(made).metadata["general.file_type"] == 7
    )
    ran("generate", made, "--prompt", "a", "-n", 3)


def test_rows_that_a_type_cannot_hold(tmp_path: Path) -> None:
    h = small(embd=256, heads=4, head_size=64, ff=96, layers=2)
    base, lora = files(tmp_path, h, "F16", (Q, "blk.0.ffn_down.weight"))
    done = ran("export-lora", base, "--lora", lora, "--type", "q4_k", "--out", tmp_path / "m.gguf")
    note = done.err.splitlines()[0]
    assert note.startswith("note: blk.0.ffn_down.weight and 1 more keep their type: rows of 96 ")
    assert note.endswith(" 256")
    types = {name: tensor.type.name for name, tensor in open_gguf(tmp_path / "m.gguf").tensors.items()}
    assert types["blk.0.ffn_down.weight"] == "F16" and types[Q] == types[OUTPUT] == "Q4_K"
    base, lora = files(tmp_path)
    done = run("export-lora", base, "--lora", lora, "--type", "q4_k", "--out", tmp_path / "n.gguf")
    failed(done, "multiples of 256 [type-does-not-fit]", 2)
    assert not (tmp_path / "n.gguf").exists()


def test_a_type_that_cannot_be_written(tmp_path: Path) -> None:
    """Such weights are copied where nothing changes them."""
    plain = open_gguf(files(tmp_path, kind="Q4_0")[0])
    other = type_by_name("MXFP4")
    infos = [
        TensorInfo(name, other if name == Q else each.type, each.shape)
        for name, each in plain.tensors.items()
    ]
    with create_gguf(tmp_path / "odd.gguf", plain.metadata.raw_values, infos) as out:
        for info in infos:
            out.write(info.name, plain.tensors[info.name].raw if info.name != Q else [bytes(info.nbytes)])
    arguments = ("export-lora", tmp_path / "odd.gguf", "--out", tmp_path / "m.gguf", "--lora")
    failed(
        run(*arguments, tmp_path / "a.gguf"),
        f"{Q} is MXFP4, which can be read but not written; choose another --type",
    )
    assert not (tmp_path / "m.gguf").exists()
    gguf.write_adapter(tmp_path / "b.gguf", adapter(H, ("blk.1.attn_v.weight",)))
    ran(*arguments, tmp_path / "b.gguf")
    ran(*arguments, tmp_path / "a.gguf", "--type", "q8_0", "--overwrite")
    assert open_gguf(tmp_path / "m.gguf").tensors[Q].type.name == "Q8_0"


def test_a_split_base_becomes_one_file(tmp_path: Path) -> None:
    base, lora = files(tmp_path, kind="Q8_0")
    whole = open_gguf(base)
    halves = (list(whole.tensors.values())[:9], list(whole.tensors.values())[9:])
    for i, tensors in enumerate(halves):
        keys = dict(whole.metadata.raw_values) if i == 0 else {}
        keys |= {"split.no": u32(i), "split.count": u32(2), "split.tensors.count": u32(21)}
        with create_gguf(tmp_path / f"s-0000{i + 1}-of-00002.gguf", keys, tensors) as out:
            for tensor in tensors:
                out.write(tensor.name, tensor.raw)
    ran("export-lora", base, "--lora", lora, "--out", tmp_path / "m.gguf")
    ran("export-lora", tmp_path / "s-00002-of-00002.gguf", "--lora", lora, "--out", tmp_path / "n.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == (tmp_path / "n.gguf").read_bytes()
    alone = written(
        tmp_path / "alone.gguf", H, weights(H), "Q8_0", {"split.no": u32(0), "split.count": u32(1)}
    )
    ran("export-lora", alone, "--lora", lora, "--out", tmp_path / "o.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == (tmp_path / "o.gguf").read_bytes()
    part = tmp_path / "s-00001-of-00002.gguf"
    done = run(
        "export-lora", tmp_path / "s-00002-of-00002.gguf", "--lora", lora, "--out", part, "--overwrite"
    )
    failed(done, "s-00002-of-00002.gguf; choose another name [replaces-input]", 2)


def test_check(tmp_path: Path) -> None:
    base, lora = files(tmp_path, WIDE, "F32", tuple(linear(WIDE)))
    arguments = (
        "export-lora",
        base,
        "--lora",
        lora,
        "--out",
        tmp_path / "m.gguf",
        "--check",
        "Once upon a time",
    )

    def told(done: Done) -> dict[str, float]:
        rows = (
            line.rsplit(None, 1)
            for line in done.out.splitlines()
            if "within" not in line and "verdict" not in line
        )
        return {name: float(value) for name, value in rows}

    def verdict(done: Done) -> str:
        return done.out.splitlines()[-1].removeprefix("verdict").strip()

    plain = ran(*arguments)
    exact = told(plain)
    assert exact["largest difference"] < 1e-4 and exact["tokens"] == 17 == exact["same next token"]
    assert verdict(plain) == "same: differences are below 0.2% of the range of the logits"
    quantised = ran(*arguments, "--type", "q8_0", "--overwrite")
    rough = told(quantised)
    assert rough["largest difference"] > rough["mean difference"] > 100 * exact["mean difference"]
    assert rough["mean divergence"] > 10 * exact["mean divergence"] and verdict(quantised).startswith(
        "close: the most likely"
    )
    broken = ran(*arguments, "--type", "q2_k", "--overwrite")
    assert verdict(broken).startswith("different: ") and "such as q8_0" in verdict(broken)
    long = ran(*arguments[:-1], "x" * 63, "--overwrite")
    assert told(long)["tokens"] == 64
    assert "first 128 of 201 tokens" in ran(*arguments[:-1], "x" * 200, "--overwrite").err


def test_check_of_an_adapter_with_norms(tmp_path: Path) -> None:
    base, lora = files(tmp_path, WIDE, "Q8_0", tuple(linear(WIDE)))
    (tmp_path / "b.bin").write_bytes(
        ggla(adapter(WIDE, (NORM, "output_norm.weight", Q), seed=2).scale_by(30), 4, 240)
    )
    arguments = (
        "export-lora",
        base,
        "--lora-scaled",
        tmp_path / "b.bin",
        0.5,
        "--lora",
        lora,
        "--check",
        "Once",
        "--out",
    )
    found = ran(*arguments, tmp_path / "m.gguf", "--type", "f32").out
    assert float(found.split()[2]) < 1e-4, found


def test_check_takes_no_copies_of_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoded, the matrices at both ends alone are 20 MB each."""
    monkeypatch.setattr(rewrite, "PANEL", 1 << 17)
    h = small(vocab=20_000, embd=256, heads=4, head_size=64, ff=64, layers=1)
    arguments = (
        "--lora",
        files(tmp_path, h, "F16")[1],
        "--check",
        "0 3 5",
        "--overwrite",
        "--out",
        tmp_path / "m.gguf",
    )
    ran("export-lora", tmp_path / "base.gguf", *arguments)  # compiles
    tracemalloc.start()
    try:
        ran("export-lora", tmp_path / "base.gguf", *arguments)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_check_of_what_cannot_be_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, lora = files(tmp_path)
    nan = written(tmp_path / "nan.gguf", H, weights(H), more={"llama.rope.scaling.attn_factor": f32(1e38)})
    arguments = ("--lora", lora, "--out", tmp_path / "m.gguf", "--check", "Once")
    failed(run("export-lora", nan, *arguments), "nan.gguf: the logits on that text are not finite")
    monkeypatch.setattr("llamatrain.model.load.available_bytes", lambda: 1000)
    done = run("export-lora", tmp_path / "base.gguf", *arguments)
    failed(done, "but 1,000 are available; a shorter text for --check needs less")
    assert not (tmp_path / "m.gguf").exists()


# ---- rounding --------------------------------------------------------------


NOTE = (
    r"note: rounding loses (\d+)% of what the adapters add to (\S+), and (\d+)% over all weights; "
    r"--type (\w+) "
)


@pytest.mark.parametrize("kind", ["q4_0", "q4_k", "q8_0", "bf16"])
@pytest.mark.parametrize("panel", [rewrite.PANEL, 1000])
def test_what_is_rounded_away_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, panel: int
) -> None:
    monkeypatch.setattr(rewrite, "PANEL", panel)
    names = (Q, "blk.0.ffn_down.weight")
    base, lora = files(tmp_path, WIDE, kind.upper(), names)
    scale = 0.001 if kind == "bf16" else 0.01
    made = read_adapter(lora, WIDE).scale_by(scale)
    done = ran("export-lora", base, "--lora-scaled", lora, scale, "--out", tmp_path / "m.gguf")
    note = re.search(NOTE, done.err)
    assert note, done.err
    plain, found = open_gguf(base), open_gguf(tmp_path / "m.gguf")
    off = {name: values(found, name) - values(plain, name) - made.delta(name) for name in names}
    shares = {name: 100 * rms(off[name]) / rms(made.delta(name)) for name in names}
    assert note[2] == max(names, key=shares.__getitem__) and abs(int(note[1]) - shares[note[2]]) < 1
    assert min(shares.values()) - 1 < int(note[3]) < max(shares.values()) + 1
    assert note[4] == {"q8_0": "f16", "bf16": "f32"}.get(kind, "q8_0")
    done = ran(
        "export-lora", base, "--lora-scaled", lora, scale, "--out", tmp_path / "n.gguf", "--type", note[4]
    )
    assert "note:" not in done.err


def test_what_is_kept_is_not_told(tmp_path: Path) -> None:
    base, lora = files(tmp_path, WIDE, "Q8_0")
    assert "note:" not in ran("export-lora", base, "--lora", lora, "--out", tmp_path / "m.gguf").err
    nothing = ran("export-lora", base, "--lora-scaled", lora, 0, "--out", tmp_path / "n.gguf")
    assert "note:" not in nothing.err


# ---- what is refused -------------------------------------------------------


def test_where_it_must_not_be_written(tmp_path: Path) -> None:
    base, lora = files(tmp_path)
    before = base.read_bytes()
    for out, told, code in (
        (base, f"--out {base} would replace the input {base}; choose another name [replaces-input]", 2),
        (lora, f"would replace the input {lora}", 2),
        (tmp_path, "this is a folder", 1),
        (tmp_path / "none" / "m.gguf", "[missing-folder]", 2),
    ):
        failed(run("export-lora", base, "--lora", lora, "--out", out, "--overwrite"), told, code)
    (tmp_path / "link").symlink_to(base)
    failed(
        run("export-lora", base, "--lora", lora, "--out", tmp_path / "link", "--overwrite"),
        "would replace",
        2,
    )
    (tmp_path / "m.gguf").write_text("mine")
    failed(run("export-lora", base, "--lora", lora, "--out", tmp_path / "m.gguf"), "[output-exists]")
    assert (tmp_path / "m.gguf").read_text() == "mine" and base.read_bytes() == before
    ran("export-lora", base, "--lora", lora, "--out", tmp_path / "m.gguf", "--overwrite")
    assert len(open_gguf(tmp_path / "m.gguf").tensors) == 21


def test_links_that_lead_to_themselves(tmp_path: Path) -> None:
    base, lora = files(tmp_path)
    loop, folder = tmp_path / "loop", tmp_path / "peft"
    loop.symlink_to(loop)
    for out, told in (
        (loop, f"{loop}: this is a link to itself"),
        (loop / "m.gguf", f"{loop}: Too many levels"),
    ):
        for more in ((), ("--overwrite",)):
            failed(run("export-lora", base, "--lora", lora, "--out", out, *more), told)
    assert loop.is_symlink() and not list(tmp_path.glob(".*"))
    peft.write_peft(folder, read_adapter(lora, H), str(base), H)
    (folder / "loop").symlink_to(folder / "loop")
    for _ in range(2):  # the second time there is something to replace
        ran("export-lora", base, "--lora", folder, "--out", tmp_path / "m.gguf", "--overwrite")


@pytest.mark.parametrize(
    ("arguments", "told", "code"),
    [
        ((), "[no-adapter]", 2),
        (("--lora", "none.gguf"), "none.gguf: No such file", 2),
        (("--lora", "base.gguf"), "no adapter but a model", 1),
        (("--lora-scaled", "a.gguf", "nan"), "(got a.gguf nan) [invalid-option]", 2),
        (("--lora-scaled", "a.gguf", "1e9"), "(got a.gguf 1e+09) [invalid-option]", 2),
        (("--lora", "wide.gguf"), "is for another base", 1),
        (("--lora", "a.gguf", "--threads", "0"), "--threads must be 1 to 1024 (got 0)", 2),
        (("--lora", "huge.gguf", "--type", "f16"), "token_embd.weight, merged: ", 1),
    ],
)
def test_what_cannot_be_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], told: str, code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    files(tmp_path)
    gguf.write_adapter("wide.gguf", adapter(WIDE, (Q,)))
    gguf.write_adapter("huge.gguf", adapter(H, (EMBEDDINGS,)).scale_by(1e6))
    there = set(tmp_path.iterdir())
    failed(run("export-lora", "base.gguf", *arguments, "--out", "m.gguf"), told, code)
    assert set(tmp_path.iterdir()) == there


def test_bases_that_are_none(tmp_path: Path) -> None:
    _, lora = files(tmp_path)
    arguments = ("--lora", lora, "--out", tmp_path / "m.gguf")
    failed(run("export-lora", lora, *arguments), "a.gguf: an adapter, not a model")
    failed(
        run("export-lora", material("ancestors/train-checkpoint.gguf"), *arguments),
        "(got a file of kind checkpoint) [not-a-model]",
    )
    written(tmp_path / "q.gguf", H, weights(H), more={"general.architecture": string("mamba")})
    failed(
        run("export-lora", tmp_path / "q.gguf", *arguments),
        "the architecture 'mamba', a recurrent model, is not supported; ",
    )
    tied = small(tied=True)
    written(tmp_path / "t.gguf", tied, weights(tied))
    gguf.write_adapter(tmp_path / "o.gguf", adapter(H, (OUTPUT,)))
    failed(run("export-lora", tmp_path / "t.gguf", "--lora", tmp_path / "o.gguf", *arguments[2:]), "are tied")


def test_a_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, lora = files(tmp_path)
    asked = []
    monkeypatch.setattr(
        "shutil.disk_usage", lambda path: asked.append(path) or type("Usage", (), {"free": 1000})()
    )
    done = run("export-lora", base, "--lora", lora, "--out", tmp_path / "m.gguf")
    assert done.code == 1 and re.search(
        r"m\.gguf needs [\d.]+ kB, but only 1 kB are free there \[disk-full\]", done.err
    )
    (tmp_path / "other").mkdir()
    (tmp_path / "link.gguf").symlink_to(tmp_path / "other" / "m.gguf")
    failed(run("export-lora", base, "--lora", lora, "--out", tmp_path / "link.gguf"), "link.gguf needs ")
    assert asked == [tmp_path, tmp_path / "other"]


def test_names_move_no_cursor(tmp_path: Path) -> None:
    base, lora = files(tmp_path)
    done = ran("export-lora", base, "--lora", lora, "--out", tmp_path / "m\n\x1b[2J.gguf")
    assert "\x1b" not in done.err and r"m\n\x1b[2J.gguf: " in done.err
