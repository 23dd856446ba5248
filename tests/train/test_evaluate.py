"""What a model foretells: the op that judges, the standard error, and what validations and `evaluate` say of it."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from llamatrain.data.batches import Batch
from llamatrain.engine.program import Program
from llamatrain.graph import ops
from llamatrain.graph.precision import round_products
from llamatrain.graph.tensor import BF16, F32, I32, Tensor, placeholder
from llamatrain.train.evaluate import LossMeter, evaluate_batch
from tests.helpers.cli import TINY, metrics, pairs_file, ran, text, text_file
from tests.helpers.lora_runs import base, random_adapter
from tests.helpers.preferences import labelled
from tests.helpers.preferences import lines as compared_lines
from tests.helpers.preferences import rows as compared_rows
from tests.helpers.small_models import small

RANDOM = np.random.default_rng(3)


def judged_by(
    kernels: str,
    x: np.ndarray,
    w: np.ndarray,
    targets: np.ndarray,
    weights: np.ndarray,
    fused: bool,
    half: bool = False,
):
    leaves = {placeholder("x", x.shape, F32): x, placeholder("w", w.shape, F32): w}
    leaves |= {
        placeholder("targets", targets.shape, I32): targets,
        placeholder("weights", weights.shape, F32): weights,
    }
    a, b, *rest = leaves
    made = (
        ops.linear_cross_entropy_judged(a, b, *rest)
        if fused
        else ops.cross_entropy_judged(ops.matmul(a, b), *rest)
    )
    plain: Tensor = (
        ops.linear_cross_entropy(a, b, *rest) if fused else ops.cross_entropy_loss(ops.matmul(a, b), *rest)
    )
    outputs = round_products([*made, plain]) if half else [*made, plain]
    program = Program.build(outputs, leaves, kernels=kernels, threads=2)
    program()
    loss, right, each, plain = (program.read(output) for output in outputs)
    assert each.sum(dtype=np.float64) == pytest.approx(float(loss), rel=1e-5) and not each[weights == 0].any()
    return [float(loss), float(right), float(plain)]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("shape", [(1, 3, 2), (70, 33, 61), (600, 16, 300), (40, 8, 4500)])
def test_targets_that_are_likeliest_are_counted(shape: tuple[int, int, int], fused: bool) -> None:
    """And the loss is, to the bit, that of the op that does not count."""
    count, width, words = shape
    x, w = (
        RANDOM.standard_normal((count, width), np.float32),
        RANDOM.standard_normal((words, width), np.float32),
    )
    best = np.argmax(x.astype(np.float64) @ w.T, axis=1)
    targets = np.where(RANDOM.random(count) < 0.5, best, RANDOM.integers(-1, words, count)).astype(np.int32)
    weights = (RANDOM.random(count) * (RANDOM.random(count) < 0.8)).astype(np.float32)
    right = np.count_nonzero((targets == best) & (weights > 0))
    for kernels in ("reference", "cpu"):
        loss, found, plain = judged_by(kernels, x, w, targets, weights, fused)
        assert found == right and loss == plain
    loss, found, plain = judged_by("cpu", x, w, targets, weights, fused, half=True)
    assert abs(found - right) <= 0.1 * count and loss == plain


def test_what_is_judged_must_have_ids_as_targets() -> None:
    x, w = (placeholder(name, (2, 3), F32) for name in "xw")
    with pytest.raises(Exception, match="needs ids as targets"):
        ops.cross_entropy_judged(x, w, placeholder("weights", (2,), F32))
    assert BF16 is not F32


class Foretold:
    """Whose losses and guesses are known."""

    def __init__(self, *told: tuple[float, int | None]) -> None:
        self.told = list(told)

    def eval_loss(self, batch: Batch) -> tuple[float, int | None]:
        self.loss, right = self.told.pop(0)
        return self.loss, right

    def token_losses(self, batch: Batch) -> np.ndarray:
        tokens = np.count_nonzero(batch.weights)
        return np.full(tokens, self.loss / tokens)


def batch_of(tokens: int) -> Batch:
    rows = np.zeros((1, 8), np.int32)
    weights = (np.arange(8) < tokens).astype(np.float32)[None]
    return Batch(tokens=rows, targets=rows, weights=weights, positions=rows, starts=rows, size=8)


def scored(told: list[tuple[float, int | None]], sizes: list[int]) -> LossMeter:
    scoring, runner = LossMeter(), Foretold(*told)
    for size in sizes:
        scoring.add(evaluate_batch(runner, batch_of(size)))  # type: ignore[arg-type]
    return scoring


def test_the_errors_are_llama_cpps() -> None:
    """For batches of one size: the deviation of their losses over the root of one less than there are."""
    losses = [2.0, 3.0, 2.5, 4.0]
    score = scored([(8 * loss, 4) for loss in losses], [8] * 4).score
    assert score.loss == pytest.approx(np.mean(losses))
    assert score.loss_error == pytest.approx(np.std(losses) / math.sqrt(3))
    assert (
        score.accuracy == 0.5
        and score.accuracy_error == pytest.approx(math.sqrt(0.25 / 31))
        and score.tokens == 32
    )


def test_batches_count_by_their_weights() -> None:
    """One with hardly any token says hardly anything."""
    one = scored([(16.0, 8), (24.0, 0), (9.0, 0)], [8, 8, 1]).score
    assert one.loss == pytest.approx(49 / 17) and one.loss_error is not None and one.loss_error < 1
    assert one.accuracy == pytest.approx(8 / 17)


def test_what_cannot_be_said_is_not() -> None:
    one = scored([(16.0, None)], [8]).score
    assert (one.loss, one.loss_error, one.accuracy, one.accuracy_error) == (2.0, None, None, None)
    assert scored([(math.nan, 3), (1.0, 3)], [8, 8]).score.accuracy is None


# ---- what is said of it ------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path, 3008)
    Path("val.txt").write_text(text(1000, seed=2))
    return tmp_path


def test_a_run_says_where_it_is_and_how_sure(place: Path) -> None:
    """In its lines, in metrics.jsonl, and at its end; one that goes on counts on."""
    how = (
        "--ctx",
        32,
        "--batch",
        4,
        "--val",
        "val.txt",
        "--eval-every",
        2,
        "--report-every",
        1,
        "--sample-every",
        0,
    )
    done = ran("from-scratch", "text.txt", *TINY, *how, "--iters", 4, "--out", "it")
    assert "epoch 1  sample  4/94" in done.err and "/step" in done.err
    assert " ± " in done.err and "accuracy" in done.err
    found = metrics(Path("it"))
    lines, validations = ([line for line in found if name in line] for name in ("loss", "val_loss"))
    assert [(line["epoch"], line["sample"], line["samples"]) for line in lines] == [
        (1, 4 * n, 94) for n in (1, 2, 3, 4)
    ]
    assert lines[-1]["total_seconds"] == pytest.approx(sum(line["seconds"] for line in lines), abs=1e-4)
    for line in validations:
        assert (
            0 < line["val_loss_error"] < 1
            and 0 <= line["val_accuracy"] <= 1
            and 0 <= line["val_accuracy_error"] < 0.1
        )
    assert "4 steps, 0.1702 times through 94 samples, 512 tokens in 0:00" in done.err
    assert f"validation loss {validations[-1]['val_loss']:.4f} ± " in done.err.splitlines()[-3]
    after = ran("from-scratch", "--resume", "it", "--iters", 26)
    assert "26 steps, 1.106 times through 94 samples" in after.err
    last = metrics(Path("it"))[-1 - sum("val_loss" in line for line in metrics(Path("it"))[-1:])]
    assert (last["epoch"], last["sample"]) == (2, 10) and last["total_seconds"] > lines[-1]["total_seconds"]


@pytest.mark.parametrize("more", [(), ("--no-pack",), ("--train-on", "all")], ids=str)
def test_the_error_is_over_samples_and_not_over_batches(more: tuple[str, ...], place: Path) -> None:
    """However many are judged at once, and whether they share rows."""
    pairs_file(place, 37)
    model = base(place / "base.gguf", small())
    found = [
        json.loads(ran("evaluate", model, "pairs.jsonl", "--ctx", 64, "--batch", batch, "--json", *more).out)
        for batch in (1, 2, 7, 40)
    ]
    errors = [each["loss_error"] for each in found]
    assert errors == pytest.approx([errors[0]] * 4, rel=1e-5) and errors[0] > 0
    apart = []
    for line in Path("pairs.jsonl").read_text().splitlines():
        (place / "one.jsonl").write_text(line + "\n")
        one = json.loads(ran("evaluate", model, "one.jsonl", "--ctx", 64, "--json", *more).out)
        apart.append((one["loss"] - found[0]["loss"]) * one["tokens"] / found[0]["tokens"])
    assert errors[0] == pytest.approx(math.sqrt(sum(each**2 for each in apart) * 37 / 36), rel=1e-4)


@pytest.mark.parametrize("objective", ["orpo", "simpo", "dpo", "kto"])
def test_the_error_of_preferences_is_over_pairs(objective: str, place: Path) -> None:
    """KTO compares an answer with those of its batch, so its losses depend on batches, and hardly its error."""
    made = compared_rows(24)
    data = compared_lines(place / "d.jsonl", labelled(made) if objective == "kto" else made)
    model = base(place / "base.gguf", small())
    random_adapter(place / "a.gguf", small(), list(small().shapes)[2:6])
    given = ("--objective", objective, "--lora", "a.gguf", "--ctx", 100, "--json")
    found = [json.loads(ran("evaluate", model, data, *given, "--batch", batch).out) for batch in (2, 5, 24)]
    errors = [each["loss_error"] for each in found]
    assert errors == pytest.approx([errors[0]] * 3, rel=0.1 if objective == "kto" else 1e-5)
    if objective in ("simpo", "dpo"):
        losses = []
        for row in made:
            compared_lines(place / "one.jsonl", [row])
            losses.append(json.loads(ran("evaluate", model, "one.jsonl", *given).out)["loss"])
        assert errors[0] == pytest.approx(np.std(losses) / math.sqrt(23), rel=1e-4)
        assert found[0]["loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def test_the_wave_has_no_end_to_be_told_of(place: Path) -> None:
    done = ran("from-scratch", "--iters", 2, "--sample-every", 0, "--out", "it")
    assert "epoch" not in done.err and "2 steps, " in done.err and "/step" in done.err


@pytest.mark.parametrize("how", [(), ("--lora", "head.gguf")])
def test_evaluate_says_how_sure_it_is(how: tuple[str, ...], place: Path) -> None:
    """With the output changed by an adapter, too, where the logits are made whole."""
    h = small()
    base(place / "M.gguf", h)
    random_adapter(place / "head.gguf", h, ["output.weight"])
    found = json.loads(ran("evaluate", "M.gguf", "val.txt", *how, "--ctx", 32, "--json").out)
    assert 0 < found["loss_error"] < 0.2 and 0 <= found["accuracy"] < 0.2
    share = found["accuracy"]
    assert found["accuracy_error"] == pytest.approx(math.sqrt(share * (1 - share) / (found["tokens"] - 1)))
    shown = ran("evaluate", "M.gguf", "val.txt", *how, "--ctx", 32).out.splitlines()
    assert all(" ± " in line for line in shown if line.startswith(("loss", "accuracy")))
