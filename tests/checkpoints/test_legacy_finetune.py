"""Checkpoints of llama.cpp's old finetune and of its L-BFGS: gone on with, and read as adapters."""

import json
from pathlib import Path

import numpy as np
import pytest

from llamatrain.adapters.adapter import Adapter
from llamatrain.adapters.read import read_adapter as read_adapter
from llamatrain.checkpoints.read import read_checkpoint
from llamatrain.errors import FileError
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.values import Value, string, u32
from llamatrain.model import hyperparameters
from tests.helpers.adapter_files import adapter, ggla, same
from tests.helpers.cli import TINY, Argument, losses, ran, run, same_bits, steps, text_file
from tests.helpers.legacy_checkpoints import WAYS, as_theirs
from tests.helpers.lora_runs import base
from tests.helpers.small_models import EMBEDDINGS, small
from tests.helpers.test_data import material
from tests.helpers.tiny_checkpoint import forge

H = small(kv_heads=4)
ROWS = ("--ctx", 32, "--batch", 8, "--no-shuffle", "--precision", "f32")
FIRST, SECOND = "optimizer.adam.first_moments", "optimizer.adam.second_moments"


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that trains all that finetune did, at two steps of four; its data are the eight rows of a batch."""
    place = tmp_path_factory.mktemp("ours")
    text_file(place, 255)
    base(place / "base.gguf", H)
    ranks = {name: 1 if "norm" in name else 3 if "attn_q" in name else 4 for name in H.shapes}
    pairs = {name: adapter(H, [name], rank=rank, scale=1.0).pairs[name] for name, rank in ranks.items()}
    (place / "first.bin").write_bytes(ggla(Adapter(source=place, alpha=4, pairs=pairs), 4, 4))
    return place


@pytest.fixture(scope="module", params=["adamw", "lbfgs"])
def begun(request: pytest.FixtureRequest, ours: Path) -> tuple[Path, tuple[Argument, ...]]:
    """The run, and the words that begin it."""
    schedule = ("--schedule", "constant", "--warmup", 0, "--lr", 3e-3)
    more = schedule if request.param == "adamw" else ("--optimizer", "lbfgs", "--lbfgs-history", 3)
    words = ("finetune", ours / "base.gguf", ours / "text.txt", *ROWS, *more)
    ran(*words, "--lora-init", ours / "first.bin", "--iters", 4, "--out", ours / request.param)
    return ours / request.param, words


def test_a_run_goes_on_as_ours_does(begun: tuple[Path, tuple[Argument, ...]], tmp_path: Path) -> None:
    """Weights, moments or history, counters: what follows is what would have followed here."""
    start, words = begun
    adam = start.name == "adamw"
    theirs = as_theirs(
        tmp_path / "chk.gguf",
        read_checkpoint(start / "checkpoint-4.gguf"),
        2,
        "right" if adam else "left, flash",
    )
    done = ran(*words, "--checkpoint-in", theirs, "--iters", 7, "--out", tmp_path / "theirs")
    ran("finetune", "--resume", start, "--iters", 7, "--out", tmp_path / "ours")
    assert losses(tmp_path / "theirs") == pytest.approx(losses(tmp_path / "ours")[-3:], rel=2e-5)
    assert [line["step"] for line in steps(tmp_path / "theirs")] == [5, 6, 7]
    assert "note: its shuffle cannot be resumed: the data starts over" in done.err
    assert ("its history of 3 moves" in done.err) == (not adam)


@pytest.mark.parametrize("way", WAYS)
def test_each_number_lies_where_it_did(
    begun: tuple[Path, tuple[Argument, ...]], tmp_path: Path, way: str
) -> None:
    start = read_checkpoint(begun[0] / "checkpoint-4.gguf")
    found = read_checkpoint(as_theirs(tmp_path / "c.gguf", start, 2, way))
    for name in found.vectors.keys() - {"optimizer.lbfgs.memory_ys"}:
        for row in range(len(start.vectors[name]) if "memory" in name else 1):
            one, other = (
                each.optimizer_values_for(list(start.weights))[name.rpartition(".")[2]].reshape(
                    -1, each.vectors[name].shape[-1]
                )[row]
                for each in (start, found)
            )
            assert np.array_equal(one, other), name
    assert all(np.array_equal(found.weights[name], weight) for name, weight in start.weights.items())
    assert found.extra["ranks"] == {
        name: 1 if "norm" in name else 3 if "attn_q" in name else 4 for name in H.shapes
    }
    assert found.state.counters.step == 4 and len(found.vectors) == (2 if begun[0].name == "adamw" else 3)


# ---- the ancestors' own ----------------------------------------------------


def test_their_own_file_goes_on(tmp_path: Path) -> None:
    model, checkpoint = material("ancestors/model.gguf"), material("ancestors/lora-checkpoint.gguf")
    (tmp_path / "text.txt").write_bytes(material("text/tinyshakespeare.txt").read_bytes()[:9000])
    words = (
        "--ctx",
        32,
        "--batch",
        4,
        "--iters",
        22,
        "--lr",
        1e-3,
        "--schedule",
        "constant",
        "--precision",
        "f32",
    )
    ran(
        "finetune",
        model,
        tmp_path / "text.txt",
        *words,
        "--checkpoint-in",
        checkpoint,
        "--out",
        tmp_path / "run",
    )
    told = steps(tmp_path / "run")
    assert [line["step"] for line in told] == [21, 22] and told[0]["tokens"] == 2560 + 128
    before, after = read_checkpoint(checkpoint), read_checkpoint(tmp_path / "run" / "checkpoint-22.gguf")
    assert all(np.abs(after.weights[name] - weight).max() < 3e-3 for name, weight in before.weights.items())
    assert all(np.any(after.weights[name] != weight) for name, weight in before.weights.items())
    old, new = before.split_vector(SECOND), after.split_vector(SECOND)
    assert all(
        (new[name] >= 0.998 * piece * 0.9999).all() for name, piece in old.items()
    )  # each has decayed twice, where it was
    ran("finetune", "--resume", tmp_path / "run", "--iters", 23)


def test_moments_of_tokens_never_seen_are_zero() -> None:
    pieces = read_checkpoint(material("ancestors/lora-checkpoint.gguf")).split_vector(SECOND)
    zero = {name: piece == 0 for name, piece in pieces.items() if not piece.all()}
    assert list(zero) == [f"{EMBEDDINGS}.lora_a"]
    assert (zero[f"{EMBEDDINGS}.lora_a"].all(1) == zero[f"{EMBEDDINGS}.lora_a"].any(1)).all()


def test_its_factors_are_those_of_the_adapter_beside_it(tmp_path: Path) -> None:
    h = hyperparameters.read_hyperparameters(open_gguf(material("ancestors/model.gguf")))
    checkpoint, lora = (material(f"ancestors/{name}") for name in ("lora-checkpoint.gguf", "lora.bin"))
    assert same(read_adapter(checkpoint, h), read_adapter(lora, h))
    ran("export-lora", material("ancestors/model.gguf"), "--lora", checkpoint, "--out", tmp_path / "m.gguf")
    same_bits_nearly(tmp_path / "m.gguf", material("ancestors/merged-by-ancestor.gguf"))


def same_bits_nearly(one: Path, other: Path) -> None:
    left, right = (open_gguf(path).tensors for path in (one, other))
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert np.abs(tensor.raw.view("<f4") - right[name].raw.view("<f4")).max() < 1e-6


@pytest.mark.parametrize("given", ["--checkpoint-in", "--resume"])
def test_only_writing_its_adapter(tmp_path: Path, given: str) -> None:
    model, checkpoint = material("ancestors/model.gguf"), material("ancestors/lora-checkpoint.gguf")
    done = ran("finetune", model, given, checkpoint, "--only-write-lora", "--out", tmp_path / "run")
    assert "llama.cpp applies no pairs of norms" in done.err
    h = hyperparameters.read_hyperparameters(open_gguf(model))
    found, wanted = read_adapter(tmp_path / "run" / "adapter.gguf", h), read_adapter(checkpoint, h)
    for name in wanted.pairs:
        np.testing.assert_allclose(found.delta(name), wanted.delta(name), rtol=1e-6, atol=1e-9)


def test_as_the_first_adapter_of_a_run(tmp_path: Path) -> None:
    model, checkpoint = material("ancestors/model.gguf"), material("ancestors/lora-checkpoint.gguf")
    (tmp_path / "text.txt").write_bytes(material("text/tinyshakespeare.txt").read_bytes()[:3000])
    words = (tmp_path / "text.txt", "--iters", 0, "--ctx", 32)
    for number, lora in enumerate((checkpoint, material("ancestors/lora.bin"))):
        ran("finetune", model, *words, "--lora-init", lora, "--out", tmp_path / f"{number}")
    same_bits(tmp_path / "0" / "adapter.gguf", tmp_path / "1" / "adapter.gguf")
    beside = [
        json.loads(ran("evaluate", model, tmp_path / "text.txt", "--ctx", 32, "--lora", path, "--json").out)[
            "loss"
        ]
        for path in (checkpoint, material("ancestors/lora.bin"))
    ]
    assert beside[0] == beside[1]


def test_going_on_leaves_the_folder_of_the_ancestor_alone(tmp_path: Path) -> None:
    """It is no run folder: its model is not ours to replace."""
    for name in ("model.gguf", "lora-checkpoint.gguf", "train-checkpoint.gguf"):
        (tmp_path / name).write_bytes(material(f"ancestors/{name}").read_bytes())
    (tmp_path / "text.txt").write_bytes(material("text/tinyshakespeare.txt").read_bytes()[:3000])
    there, before = {*tmp_path.iterdir()}, (tmp_path / "model.gguf").read_bytes()
    words = (tmp_path / "text.txt", "--iters", 21, "--ctx", 32, "--batch", 2)
    ran("from-scratch", *words, "--resume", tmp_path / "train-checkpoint.gguf", "--out", tmp_path / "one")
    ran(
        "finetune",
        tmp_path / "model.gguf",
        *words,
        "--resume",
        tmp_path / "lora-checkpoint.gguf",
        "--out",
        tmp_path / "two",
    )
    assert {*tmp_path.iterdir()} - there == {tmp_path / "one", tmp_path / "two"}
    assert (tmp_path / "model.gguf").read_bytes() == before


# ---- L-BFGS ----------------------------------------------------------------


def test_the_history_of_a_new_model_goes_on(tmp_path: Path) -> None:
    data = text_file(tmp_path, 255)
    words = ("from-scratch", data, *TINY, "--ctx", 32, "--batch", 8, "--no-shuffle", "--optimizer", "lbfgs")
    ran(*words, "--iters", 5, "--out", tmp_path / "run")
    theirs = as_theirs(
        tmp_path / "c.gguf", read_checkpoint(tmp_path / "run" / "checkpoint-5.gguf"), 2, "right"
    )
    went = (
        "--ctx",
        32,
        "--batch",
        8,
        "--no-shuffle",
        "--optimizer",
        "lbfgs",
        "--precision",
        "f32",
        "--iters",
        8,
    )
    ran("from-scratch", data, *went, "--checkpoint-in", theirs, "--out", tmp_path / "theirs")
    ran("from-scratch", "--resume", tmp_path / "run", "--iters", 8)
    assert losses(tmp_path / "theirs") == pytest.approx(losses(tmp_path / "run")[5:], rel=1e-4)


# ---- what is refused -------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("finetune", "B", "T", "--checkpoint-in", "C", "--lora-r", 4),
            "--lora-r has no effect on the adapter in C",
        ),
        (
            ("finetune", "B", "T", "--checkpoint-in", "C", "--full"),
            "--full has no effect on the adapter in C",
        ),
        (
            ("finetune", "T", "--checkpoint-in", "C"),
            "C: this checkpoint of llama.cpp's finetune names neither",
        ),
        (("finetune", "B", "--checkpoint-in", "C"), "llamatrain finetune BASE.gguf DATA --checkpoint-in C"),
        (
            ("from-scratch", "T", "--checkpoint-in", "C"),
            "llamatrain finetune BASE.gguf DATA --checkpoint-in C",
        ),
    ],
)
def test_what_is_to_be_said_beside_it(tmp_path: Path, words: tuple[Argument, ...], told: str) -> None:
    checkpoint = str(material("ancestors/lora-checkpoint.gguf"))
    names = {"B": material("ancestors/model.gguf"), "T": text_file(tmp_path), "C": checkpoint}
    done = run(*(names.get(str(word), word) for word in words), "--out", tmp_path / "run")
    assert (
        done.code == 2 and told.replace(" C", f" {checkpoint}").replace("C:", f"{checkpoint}:") in done.err
    ), done.err
    assert not (tmp_path / "run").exists() and done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("values", "tensors", "told"),
    [
        (
            {"training.lora.rank.attn_q": u32(5)},
            {},
            "training.lora.rank.attn_q is 5, but the factors of 'blk.0.attn_q.weight' have",
        ),
        (
            {"llama.block_count": u32(1 << 30)},
            {},
            "21 pairs of factors do not match a llama of 1073741824 layers",
        ),
        ({}, {"output.weight.lora_b": None}, "20 pairs of factors do not match"),
        ({}, {"blk.0.attn_q.weight.lora_a": np.zeros((32, 8), np.float32)}, "differ in rank"),
        (
            {},
            {SECOND: np.zeros(7, np.float32)},
            f"tensor {SECOND} must have the shape [13637] (got [7])",
        ),
        ({}, {SECOND: None}, f"tensor {SECOND} is missing"),
        (
            {"training.type": string("dpo")},
            {},
            "unknown type of run 'dpo'; llama.cpp wrote train_model, finetune_lora",
        ),
        ({"optimizer.type": string("lbfgs")}, {}, "tensor optimizer.lbfgs.current_parameters is missing"),
    ],
)
def test_what_cannot_be_theirs(tmp_path: Path, values: dict, tensors: dict, told: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(FileError) as error:
        read_checkpoint(
            forge(material("ancestors/lora-checkpoint.gguf"), tmp_path / "c.gguf", values, tensors)
        )
    assert told in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("begun", ["lbfgs"], indirect=True)
@pytest.mark.parametrize(
    ("key", "value"),
    [("approx_hessian_count", u32(0)), ("approx_hessian_count", u32(2**31)), ("line_search_end", u32(77))],
)
def test_histories_that_cannot_be(
    begun: tuple[Path, tuple[Argument, ...]], tmp_path: Path, key: str, value: Value
) -> None:
    theirs = as_theirs(tmp_path / "c.gguf", read_checkpoint(begun[0] / "checkpoint-4.gguf"), 2)
    with pytest.raises(FileError, match="invalid L-BFGS history"):
        read_checkpoint(forge(theirs, tmp_path / "d.gguf", {f"optimizer.lbfgs.{key}": value}))
