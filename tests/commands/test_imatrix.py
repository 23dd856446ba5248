"""`llamatrain imatrix` and `export-lora --imatrix`: what is measured, what it changes, what is refused."""

from pathlib import Path

import numpy as np
import pytest

import llamatrain
from llamatrain.gguf.imatrix import InputSums, read_imatrix, write_imatrix
from llamatrain.gguf.quants import decode, encode
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.types import type_by_name
from tests.helpers import architecture_models
from tests.helpers.cli import Argument, Done, ran, run
from tests.helpers.mpi_programs import needs_mpi
from tests.helpers.multi_rank import done_by, job
from tests.helpers.small_models import small, weights, written

H = small(embd=64, ff=96, layers=2)
TEXT = "The sums of squares of what each column is multiplied with. " * 20


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(Path("m.gguf"), H, weights(H))
    Path("t.txt").write_text(TEXT)


def failed(done: Done, told: str, code: int = 1) -> None:
    assert done.code == code and len(done.errors) == 1 and told in done.errors[0], done.err
    assert "Traceback" not in done.err and not Path("i.gguf").exists() and not Path("q.gguf").exists()


def sums(path: str = "i.gguf") -> dict[str, np.ndarray]:
    return {name: tensor.raw.view("<f4") for name, tensor in open_gguf(path).tensors.items()}


# ---- measuring -------------------------------------------------------------


def test_each_matrix_has_sums() -> None:
    done = ran("imatrix", "m.gguf", "t.txt", "--ctx", 32, "--out", "i.gguf")
    assert "i.gguf: an importance matrix of 15 weights, from" in done.err and not done.out
    found = sums()
    matrices = {name for name, shape in H.shapes.items() if len(shape) == 2 and name != "token_embd.weight"}
    assert {name.rpartition(".")[0] for name in found} == matrices
    tokens = {float(each.item()) for name, each in found.items() if name.endswith(".counts")}
    assert len(tokens) == 1 and tokens.pop() >= len(TEXT)
    for name in matrices:
        assert (
            found[f"{name}.in_sum2"].shape == (1, H.shapes[name][-1]) and (found[f"{name}.in_sum2"] > 0).all()
        )
    same = [found[f"blk.1.attn_{part}.weight.in_sum2"] for part in "qkv"]
    assert np.array_equal(same[0], same[1]) and np.array_equal(same[0], same[2])
    metadata = open_gguf("i.gguf").metadata
    assert metadata["imatrix.chunk_size"] == 32 and metadata["imatrix.datasets"] == ["t.txt"]
    assert "importance matrix" in ran("inspect", "i.gguf").out


def test_rows_add_up() -> None:
    """The sums of all rows are those of the first ones and of the rest."""
    for name, more in (("one", ("--chunks", 1)), ("three", ("--chunks", 3))):
        ran("imatrix", "m.gguf", "t.txt", "--ctx", 32, "--out", f"{name}.gguf", *more)
    one, three = sums("one.gguf"), sums("three.gguf")
    assert float(one["output.weight.counts"].item()) * 3 == float(three["output.weight.counts"].item())
    assert (three["output.weight.in_sum2"] > one["output.weight.in_sum2"]).all()
    assert open_gguf("three.gguf").metadata["imatrix.chunk_count"] == 3


def test_chats_and_short_rows_are_not_padded() -> None:
    """Each token counts once, whatever the length of the row that holds it."""
    Path("rows.jsonl").write_text(
        '{"prompt": "a", "completion": "b"}\n{"prompt": "abcdef", "completion": "' + "x" * 40 + '"}\n'
    )
    ran("imatrix", "m.gguf", "rows.jsonl", "--ctx", 64, "--out", "i.gguf", "--no-pack")
    ran("imatrix", "m.gguf", "rows.jsonl", "--ctx", 64, "--out", "packed.gguf", "--pack")
    alone, packed = sums(), sums("packed.gguf")
    for name, each in alone.items():
        np.testing.assert_allclose(each, packed[name], rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("family", ["qwen3moe", "qwen35moe", "gemma3", "lfm2", "granitehybrid", "deepseek2"])
def test_other_architectures(family: str) -> None:
    shape = architecture_models.shape_of(family, "a")
    architecture_models.written(Path("m.gguf"), shape, architecture_models.weights(shape))
    ran("imatrix", "m.gguf", "t.txt", "--ctx", 32, "--chunks", 2, "--out", "i.gguf")
    found, names = sums(), open_gguf("m.gguf").tensors
    tokens = found["output.weight.counts" if "output.weight" in names else "token_embd.weight.counts"].item()
    stacks = [name for name in names if "_exps.weight" in name]
    for name in stacks:
        chosen = found[f"{name}.counts"].sum()
        assert (
            len(found[f"{name}.counts"]) == names[name].shape[0] and chosen > tokens and chosen % tokens == 0
        )


def test_python_gives_the_same() -> None:
    ran("imatrix", "m.gguf", "t.txt", "--ctx", 32, "--out", "i.gguf")
    made = llamatrain.imatrix("m.gguf", "t.txt", ctx=32, out="p.gguf")
    assert made.path == Path("p.gguf") and made.weights == 15 and made.chunks > 2 and not made.notes
    assert Path("p.gguf").read_bytes() == Path("i.gguf").read_bytes()


@needs_mpi
def test_two_ranks_write_the_same_bytes(tmp_path: Path) -> None:
    here = {name: str(tmp_path / name) for name in ("m.gguf", "t.txt")}
    ran("imatrix", here["m.gguf"], here["t.txt"], "--ctx", 32, "--chunks", 5, "--out", "i.gguf")
    call = job("imatrix", here["m.gguf"], here["t.txt"], ctx=32, chunks=5, out=tmp_path / "two.gguf")
    (given,) = done_by(2, [call], tmp_path)
    assert given["chunks"] == 5
    assert Path("two.gguf").read_bytes() == Path("i.gguf").read_bytes()


@pytest.mark.parametrize(
    ("words", "told", "code"),
    [
        (("m.gguf",), "no data given", 2),
        (("t.txt", "m.gguf"), "the model must come first", 2),
        (("m.gguf", "none.txt"), "none.txt", 2),
        (("m.gguf", "t.txt", "--chunks", 0), "--chunks must be", 2),
        (("m.gguf", "t.txt", "--iters", 3), "iters", 2),
        (("m.gguf", "t.txt", "--val", "t.txt"), "--val has no effect for imatrix", 2),
        (("none.gguf", "t.txt"), "none.gguf", 2),
        (("t.txt", "t.txt"), "t.txt", 1),
        (("measured.gguf", "t.txt"), "an importance matrix, not a model", 1),
    ],
)
def test_what_is_refused(words: tuple[Argument, ...], told: str, code: int) -> None:
    write_imatrix(Path("measured.gguf"), {"x": InputSums(np.ones((1, 8)), np.ones(1))}, [], 1, 1)
    failed(run("imatrix", *words, "--out", "i.gguf"), told, code)


def test_outputs_are_not_replaced() -> None:
    for out, told in (("m.gguf", "would replace the input"), ("t.txt", "would replace the input")):
        done = run("imatrix", "m.gguf", "t.txt", "--out", out, "--overwrite")
        failed(done, told, 2)
    Path("other.gguf").write_text("mine")
    failed(run("imatrix", "m.gguf", "t.txt", "--out", "other.gguf"), "exists already")
    assert Path("other.gguf").read_text() == "mine"


def test_weights_that_are_not_finite() -> None:
    arrays = weights(H)
    arrays["blk.0.attn_v.weight"][:] = 3e38
    written(Path("m.gguf"), H, arrays)
    failed(run("imatrix", "m.gguf", "t.txt", "--ctx", 32, "--out", "i.gguf"), "not finite")


# ---- encoding --------------------------------------------------------------


def importances() -> None:
    """Write some that differ much, for all matrices but one."""
    random = np.random.default_rng(0)
    write_imatrix(
        Path("i.gguf"),
        {
            name: InputSums(random.gamma(0.3, 1.0, (1, shape[-1])), np.ones(1))
            for name, shape in H.shapes.items()
            if len(shape) == 2 and name not in ("token_embd.weight", "blk.0.attn_q.weight")
        },
        [],
        1,
        1,
    )


@pytest.mark.parametrize("kind", ["q4_0", "iq4_nl"])
def test_matrices_are_encoded_by_importance(kind: str) -> None:
    importances()
    done = ran("export-lora", "m.gguf", "--type", kind, "--imatrix", "i.gguf", "--out", "q.gguf")
    assert "token_embd.weight and 1 more are not in the importance matrix" in done.err
    found, types, arrays = open_gguf("q.gguf").tensors, type_by_name(kind.upper()), weights(H)
    means = read_imatrix(Path("i.gguf"))
    differing = 0
    for name, shape in H.shapes.items():
        if len(shape) != 2 or found[name].type is not types:
            continue
        importance = means[name][0] if name in means else None
        wanted = encode(arrays[name], types, importance=importance)
        np.testing.assert_array_equal(found[name].raw, wanted, err_msg=name)
        differing += importance is not None and not np.array_equal(wanted, encode(arrays[name], types))
    assert differing >= 10


def test_experts_are_encoded_by_their_own_importances() -> None:
    shape = architecture_models.wide("qwen3moe")
    arrays = architecture_models.weights(shape)
    architecture_models.written(Path("m.gguf"), shape, arrays)
    ran("imatrix", "m.gguf", "t.txt", "--ctx", 32, "--out", "i.gguf")
    ran("export-lora", "m.gguf", "--type", "q4_0", "--imatrix", "i.gguf", "--out", "q.gguf")
    kind, means = type_by_name("Q4_0"), read_imatrix(Path("i.gguf"))
    tensors = open_gguf("q.gguf").tensors
    stacks = [name for name, each in tensors.items() if len(each.shape) == 3 and each.type is kind]
    assert stacks
    for name in stacks:
        for expert, matrix in enumerate(arrays[name]):
            wanted = encode(matrix, kind, importance=means[name][expert])
            np.testing.assert_array_equal(tensors[name].raw[expert], wanted, err_msg=name)
            assert np.abs(decode(wanted, kind) - matrix).max() < 1


@pytest.mark.parametrize(
    ("words", "told", "code"),
    [
        (("--type", "q8_0", "--imatrix", "i.gguf"), "--imatrix has no effect on the types", 2),
        (("--type", "q4_0", "--imatrix", "m.gguf"), "importance matrix of llama.cpp is needed", 1),
        (("--type", "q4_0", "--imatrix", "none.gguf"), "none.gguf", 2),
        (("--type", "q4_0", "--imatrix", "t.txt"), "importance matrix of llama.cpp is needed", 1),
        (("--imatrix", "i.gguf"), "no adapter to merge", 2),
    ],
)
def test_imatrix_of_no_use(words: tuple[Argument, ...], told: str, code: int) -> None:
    importances()
    Path("i.gguf").rename("kept.gguf")
    words = tuple("kept.gguf" if word == "i.gguf" else word for word in words)
    failed(run("export-lora", "m.gguf", *words, "--out", "q.gguf"), told, code)


def test_imatrix_of_another_model() -> None:
    other = {"output.weight": InputSums(np.ones((1, 8)), np.ones(1))}
    write_imatrix(Path("o.gguf"), other, [], 1, 1)
    done = run("export-lora", "m.gguf", "--type", "q4_0", "--imatrix", "o.gguf", "--out", "q.gguf")
    failed(done, "has 8 importances, but that weight of the model needs 64")
