"""Checkpoints written by llama.cpp's own train-text-from-scratch."""

import math
from pathlib import Path

import numpy as np
import pytest

from llamatrain.checkpoints.checkpoint import write_checkpoint
from llamatrain.checkpoints.read import read_checkpoint
from llamatrain.errors import FileError
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.values import Value, boolean, string, u32, u64
from llamatrain.optim.early_stop import StopState
from llamatrain.train.state import Counters
from tests.helpers.legacy_checkpoints import FILE
from tests.helpers.test_data import material
from tests.helpers.tiny_checkpoint import forge

FIRST, SECOND = "optimizer.adam.first_moments", "optimizer.adam.second_moments"
FIRST_BLOCK = [f"blk.0.{name}.weight" for name in FILE]
RING = "optimizer.adam.past_loss_values"


@pytest.fixture(scope="module")
def theirs() -> Path:
    return material("ancestors/train-checkpoint.gguf")


def refused(path: Path) -> str:
    with pytest.raises(FileError) as caught:
        read_checkpoint(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_taken_over(theirs: Path) -> None:
    found, gguf = read_checkpoint(theirs), open_gguf(theirs)
    assert found.state.counters == Counters(step=20, samples=84, tokens=2560, epoch=0, seconds=0.0)
    assert found.state.stop == StopState(
        *(gguf.metadata[f"optimizer.adam.{key}_loss"] for key in ("best", "previous"))
    )
    assert (found.kind, found.optimizer, found.options, found.state.data, found.state.partial) == (
        "train_model",
        "adam",
        {},
        None,
        None,
    )
    assert list(found.weights) == list(gguf.tensors)[:21] and sorted(found.order) == sorted(found.weights)
    assert list(found.vectors) == [FIRST, SECOND]
    assert "shuffle cannot be resumed" in " ".join(found.notes)


def test_the_model_written_from_it_is_clean(theirs: Path) -> None:
    found, gguf = read_checkpoint(theirs), open_gguf(theirs)
    dropped = {
        key for key in gguf.metadata if not key.startswith(("training.", "optimizer."))
    } - found.metadata.keys()
    assert dropped == {"tokenizer.ggml.seperator_token_id", "tokenizer.ggml.padding_token_id"}
    assert found.metadata["llama.rope.scale_linear"].decode() == 1.0


def test_it_comes_back_from_the_present_form(theirs: Path, tmp_path: Path) -> None:
    first = read_checkpoint(theirs)
    write_checkpoint(tmp_path / "c.gguf", first)
    second = read_checkpoint(tmp_path / "c.gguf")
    assert (second.state.counters, second.state.stop, second.order, second.notes) == (
        first.state.counters,
        first.state.stop,
        first.order,
        [],
    )
    for name, array in (first.weights | first.vectors).items():
        np.testing.assert_array_equal((second.weights | second.vectors)[name], array)


# ---- the order of their moments --------------------------------------------


def test_moments_of_tokens_never_seen_are_zero(theirs: Path) -> None:
    """Whole rows of the embedding, and nothing else."""
    pieces = read_checkpoint(theirs).split_vector(SECOND)
    zero = {name: piece == 0 for name, piece in pieces.items() if not piece.all()}
    assert list(zero) == ["token_embd.weight"]
    rows = zero["token_embd.weight"]
    assert 0 < rows.all(1).sum() < len(rows) and (rows.all(1) == rows.any(1)).all()


@pytest.mark.reference
def test_moments_point_where_gradients_do(theirs: Path) -> None:
    """Each parameter's first moments are like its own gradient on some text, and like no other's of that shape."""
    torch = pytest.importorskip("torch")
    from llamatrain.data.tokenizer import load
    from tests.helpers.random_models import Size
    from tests.helpers.torch_llama import TorchLlama

    checkpoint, ctx, rows = read_checkpoint(theirs), 32, 200
    text = material("text/tinyshakespeare.txt").read_text()[:40_000]
    tokens = load(open_gguf(theirs).metadata).encode(text)[: ctx * rows].reshape(rows, ctx)
    model = TorchLlama(Size(vocab=512, width=64, layers=2, heads=4, kv_heads=4, ff=128, ctx=ctx, batch=rows))
    model.load_state_dict({name: torch.tensor(np.array(array)) for name, array in checkpoint.weights.items()})
    inputs = np.concatenate([np.ones((rows, 1), tokens.dtype), tokens[:, :-1]], 1)
    model.loss(torch.tensor(inputs), torch.tensor(tokens).flatten()).backward()
    moments = checkpoint.split_vector(FIRST)
    unit = {
        name: weight.grad.numpy() / weight.grad.norm().item() for name, weight in model.named_parameters()
    }
    for name, moment in moments.items():
        alike = {
            other: np.vdot(grad, moment) / np.linalg.norm(moment)
            for other, grad in unit.items()
            if grad.shape == moment.shape
        }
        assert alike.pop(name) > 0.5
        assert not alike or max(alike.values()) < 0.35
        assert (
            len(set(moment.shape)) == 2
            or moment.ndim == 1
            or np.vdot(unit[name].T, moment) < 0.2 * np.linalg.norm(moment)
        )


def test_another_order_is_refused(theirs: Path, tmp_path: Path) -> None:
    """Where the embedding's rows lie nowhere that the ancestor could have put them."""
    second = read_checkpoint(theirs).vectors[SECOND]
    assert "the order of the moments is unknown" in refused(
        forge(theirs, tmp_path / "c.gguf", {}, {SECOND: np.roll(second, 40_000)})
    )
    fresh = read_checkpoint(forge(theirs, tmp_path / "c.gguf", {}, {SECOND: np.zeros_like(second)}))
    assert not fresh.vectors[SECOND].any()


# ---- other versions of it --------------------------------------------------


def test_version_0_counts_in_32_bits_and_knows_no_epochs(theirs: Path, tmp_path: Path) -> None:
    optional = (
        "training.epoch_count",
        "training.type",
        *(f"training.shuffle.{key}" for key in ("samples_hash", "rng_state")),
    )
    values: dict[str, Value | None] = dict.fromkeys(optional)
    values |= {
        f"training.{key}_count": u32(number)
        for key, number in (("iteration", 20), ("sample", 84), ("token", 2560))
    }
    found = read_checkpoint(forge(theirs, tmp_path / "c.gguf", values | {"training.file_version": u32(0)}))
    assert found.state.counters == read_checkpoint(theirs).state.counters and found.kind == "train_model"


@pytest.mark.parametrize(
    ("step", "oldest_first"), [(20, [0, 1, 2, 3]), (21, [1, 2, 3, 0]), (23, [3, 0, 1, 2]), (2, [0, 1])]
)
def test_past_losses_come_out_of_the_ring(
    theirs: Path, tmp_path: Path, step: int, oldest_first: list[int]
) -> None:
    """Of 4 losses that of iteration i is at i modulo 4: the next to be written over is the oldest."""
    losses = np.array([6.5, 6.25, 6.0, 6.75], np.float32)
    found = read_checkpoint(
        forge(theirs, tmp_path / "c.gguf", {"training.iteration_count": u64(step)}, {RING: losses})
    )
    assert found.state.stop.past_loss_values == losses[oldest_first].tolist() and RING not in found.vectors


def test_one_that_never_stepped_has_no_losses(theirs: Path, tmp_path: Path) -> None:
    found = read_checkpoint(forge(theirs, tmp_path / "c.gguf", {"optimizer.just_initialized": boolean(True)}))
    assert found.state.stop.best_loss == math.inf and math.isnan(found.state.stop.previous_loss)


@pytest.mark.parametrize(
    ("values", "gone", "reason"),
    [
        (
            {"optimizer.type": string("a\nb")},
            [],
            r"unknown optimizer 'a\nb'; llama.cpp had adam and lbfgs",
        ),
        ({"llama.block_count": u32(2**31)}, [], "21 weights do not match a llama of 2147483648 layers"),
        ({}, ["output.weight"], "20 weights do not match"),
        ({"llama.block_count": u32(1)}, FIRST_BLOCK, "tensor blk.0.ffn_down.weight is missing"),
        ({}, [SECOND], f"tensor {SECOND} is missing"),
        ({"optimizer.parameter_count": u64(5)}, [], "21 parameters must have 5 elements"),
        ({"training.iteration_count": None}, [], "training.iteration_count is missing"),
        ({"optimizer.adam.best_loss": None}, [], "optimizer.adam.best_loss is missing"),
    ],
)
def test_what_cannot_be_theirs_is_refused(
    theirs: Path, tmp_path: Path, values: dict[str, Value | None], gone: list[str], reason: str
) -> None:
    assert reason in refused(forge(theirs, tmp_path / "c.gguf", values, dict.fromkeys(gone)))
