"""Checkpoints from before GGUF (pcgg of train-text-from-scratch, lcgg of finetune): read as the files they were converted to."""

import struct
from pathlib import Path

import numpy as np
import pytest

from llamatrain.adapters.read import read_adapter as read_adapter
from llamatrain.checkpoints.read import read_checkpoint
from llamatrain.errors import FileError
from llamatrain.gguf.reader import open_gguf
from llamatrain.model import hyperparameters
from tests.helpers.adapter_files import same
from tests.helpers.cli import TINY, losses, ran, run, text_file
from tests.helpers.legacy_checkpoints import FILE, as_theirs
from tests.helpers.test_data import material

RANKS = (*FILE, "token_embd", "output_norm", "output")


def record(at: int, array: np.ndarray | None, name: str = "") -> bytes:
    """At a place in the file: what it has of a tensor, or of none."""
    raw = b"".join((struct.pack("<III", 0, 0, 0),))
    if array is not None:
        raw = struct.pack(f"<III{array.ndim}I", array.ndim, len(name), 0, *array.shape[::-1]) + name.encode()
    raw += bytes(-(at + len(raw)) % 32)
    return raw + (b"" if array is None else array.astype("<f4").tobytes())


def written(path: Path, source: Path, version: int) -> Path:
    """A converted file as it was before it was converted; the optimizer's part of this version."""
    gguf, values = open_gguf(source), open_gguf(source).metadata
    arrays = {name: tensor.raw.view("<f4").reshape(tensor.shape) for name, tensor in gguf.tensors.items()}
    adapter, optimizer = values["training.type"] == "finetune_lora", values["optimizer.type"]
    counts = [values[f"training.{name}_count"] for name in ("iteration", "sample", "token")]
    tokens = arrays["token_embd.weight.lora_b" if adapter else "token_embd.weight"].shape[0]
    keys = ("embedding_length", "attention.head_count", "block_count", "rope.dimension_count")
    width, heads, layers, rotated = (values[f"llama.{key}"] for key in keys)
    raw = (b"lcgg" if adapter else b"pcgg") + struct.pack(
        "<10I", 0, *counts, tokens, width, 32, heads, layers, rotated
    )
    if adapter:
        raw += struct.pack("<12I", *(values[f"training.lora.rank.{name}"] for name in RANKS))
    for name, array in arrays.items():
        if not name.startswith("optimizer."):
            raw += record(len(raw), array, "some name")
    raw += struct.pack("<I", version)
    kind, moves = int(optimizer == "lbfgs"), 3 if optimizer == "lbfgs" else 6
    if version == 0:
        adam = (256, 1.0, 0.125, 0.5, 0.75, 0.875, 0.25, 0.0, 0.0)
        raw += struct.pack(
            "<Iiif4x4xi8f3i5fI", kind, 6, 0, 1e-5, *adam, moves, 16, 20, 1e-5, 1e-4, 0.9, 1e-20, 1e20, 1
        )
    else:
        raw += struct.pack("<ii", 0, moves)
    size = values["optimizer.parameter_count"]
    raw += struct.pack("<Qii", size, counts[0], 0)
    vectors = {
        name.rpartition(".")[2]: array for name, array in arrays.items() if name.startswith("optimizer.")
    }
    first, second = vectors.get("first_moments"), vectors.get("second_moments")
    work = np.ones(size, np.float32)
    if kind:
        points = [
            vectors[f"{which}_{what}"]
            for what in ("parameters", "gradients")
            for which in ("current", "previous")
        ]
        rings = [vectors[f"memory_{name}"] for name in ("alpha", "ys", "s", "y")]
        for array in (*points, vectors["search_direction"], None, *rings):
            raw += record(len(raw), array)
    else:
        before = (vectors["x"], work, work) if version == 0 else ()
        for array in (*before, first, second, *((work, work) if version == 0 else ()), None):
            raw += record(len(raw), array)
    prefix = f"optimizer.{optimizer}."
    if kind:
        searched = [values[f"{prefix}line_search_{name}"] for name in ("step", "j", "k", "end")]
        raw += struct.pack("<ffiiii", values[f"{prefix}best_loss"], *searched, 0)
    else:
        raw += struct.pack("<ffi", values[f"{prefix}best_loss"], values[f"{prefix}previous_loss"], 0)
    path.write_bytes(raw)
    return path


@pytest.fixture(scope="module", params=["adamw", "lbfgs"])
def converted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, tuple[object, ...]]:
    """A run of ours, and the same in the ancestors' GGUF."""
    place = tmp_path_factory.mktemp("run")
    more = (
        ("--schedule", "constant", "--warmup", 0)
        if request.param == "adamw"
        else ("--optimizer", "lbfgs", "--lbfgs-history", 3)
    )
    words = ("--ctx", 32, "--batch", 8, "--no-shuffle", *more)
    data = text_file(place, 255)
    ran("from-scratch", data, *TINY, *words, "--norm-rms-eps", 1e-5, "--iters", 4, "--out", place / "run")
    as_theirs(
        place / "chk.gguf",
        read_checkpoint(place / "run" / "checkpoint-4.gguf"),
        2,
        "right" if request.param == "lbfgs" else "left",
    )
    return place, (data, *words, "--precision", "f32")


def with_parameters(source: Path, target: Path, ours: Path) -> Path:
    """Version 0 of Adam kept the parameters, too."""
    from llamatrain.gguf.types import TensorInfo, type_by_name
    from llamatrain.gguf.writer import create_gguf
    from tests.helpers.legacy_checkpoints import met

    gguf, weights = open_gguf(source), read_checkpoint(ours).weights
    arrays = {name: tensor.raw.view("<f4").reshape(tensor.shape) for name, tensor in gguf.tensors.items()}
    arrays["optimizer.adam.x"] = np.concatenate([weights[name].ravel() for name in met("left", 2)])
    with create_gguf(
        target,
        dict(gguf.metadata.raw_values),
        [TensorInfo(n, type_by_name("F32"), a.shape) for n, a in arrays.items()],
    ) as out:
        for name, array in arrays.items():
            out.write(name, array)
    return target


def test_a_new_model_goes_on(converted: tuple[Path, tuple[object, ...]], tmp_path: Path) -> None:
    """Of Adam by version 0, whose parameters tell the order; of L-BFGS by version 1, which does not say that it is that."""
    place, words = converted
    source, ours, adam = place / "chk.gguf", place / "run" / "checkpoint-4.gguf", "lbfgs" not in words
    old = written(
        tmp_path / "chk.bin", with_parameters(source, tmp_path / "x.gguf", ours) if adam else source, 1 - adam
    )
    begun = ("from-scratch", *words, "--iters", 6, "--vocab-from", place / "run" / "model.gguf")
    done = ran(*begun, "--checkpoint-in", old, "--out", tmp_path / "old")
    ran("from-scratch", "--resume", place / "run", "--iters", 6, "--out", tmp_path / "ours")
    assert losses(tmp_path / "old") == pytest.approx(losses(tmp_path / "ours")[-2:], rel=1e-4)
    assert (
        "note: it is older than GGUF and does not state: epsilon of its norms (1e-05 is taken), context length, vocab"
        in done.err
    )
    assert (
        "note: it was trained with --lr 0.5 --beta1 0.75 --beta2 0.875 --eps 0.25 --weight-decay 0.125"
        in done.err
    ) == adam
    ran("from-scratch", "--resume", tmp_path / "old", "--iters", 7)
    assert "iteration_count" in ran("inspect", old).out


def test_without_a_vocabulary(converted: tuple[Path, tuple[object, ...]], tmp_path: Path) -> None:
    place, words = converted
    old = written(tmp_path / "chk.bin", place / "chk.gguf", 1)
    done = run("from-scratch", *words, "--iters", 6, "--checkpoint-in", old, "--out", tmp_path / "run")
    assert done.code in (1, 2) and "has no vocabulary; name a file that has one with --vocab-from" in done.err
    assert not (tmp_path / "run").exists()


def test_an_adapter_of_finetune(tmp_path: Path) -> None:
    model, theirs = material("ancestors/model.gguf"), material("ancestors/lora-checkpoint.gguf")
    old = written(tmp_path / "chk.bin", theirs, 1)
    h = hyperparameters.read_hyperparameters(open_gguf(model))
    assert same(read_adapter(old, h), read_adapter(theirs, h))
    one, other = read_checkpoint(old), read_checkpoint(theirs)
    assert one.order == other.order and one.extra == other.extra
    assert all(np.array_equal(one.vectors[name], other.vectors[name]) for name in other.vectors)
    assert one.state.counters.step == 20 and one.state.stop.best_loss == other.state.stop.best_loss
    data = text_file(tmp_path, 500)
    words = ("--ctx", 32, "--batch", 4, "--iters", 21)
    for name, checkpoint in (("old", old), ("new", theirs)):
        ran("finetune", model, data, *words, "--checkpoint-in", checkpoint, "--out", tmp_path / name)
    assert losses(tmp_path / "old") == losses(tmp_path / "new")
    ran("export-lora", model, "--lora", old, "--out", tmp_path / "m.gguf")


def test_damaged_ones_are_refused(tmp_path: Path) -> None:
    """Cut off or changed anywhere, it is told in a line, whatever the numbers ask for."""
    whole = written(tmp_path / "chk.bin", material("ancestors/lora-checkpoint.gguf"), 1).read_bytes()
    path = tmp_path / "bad.bin"
    cuts = [whole[:size] for size in (4, 7, 30, 44, 91, 200, 5000, len(whole) - 1)]
    huge = [whole[:at] + b"\xff\xff\xff\x7f" + whole[at + 4 :] for at in (4, 20, 36, 92, 96, 100, 104, 108)]
    for raw in (*cuts, *huge, whole + b"1"):
        path.write_bytes(raw)
        with pytest.raises(FileError) as error:
            read_checkpoint(path)
        assert "\n" not in str(error.value) and str(error.value).startswith(str(path))


@pytest.mark.parametrize("magic", [b"tjgg", b"lmgg", b"fmgg"])
def test_models_from_before_gguf_are_told_by_what_they_are(tmp_path: Path, magic: bytes) -> None:
    (tmp_path / "old.bin").write_bytes(magic + bytes(60))
    done = run("inspect", tmp_path / "old.bin")
    assert (
        done.code == 1 and "a model from before GGUF; convert it with llama.cpp's scripts of 2023" in done.err
    )
