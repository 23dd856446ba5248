"""`evaluate --compare`: losses of two models on the same rows, and the divergence between them."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from llamatrain import evaluate
from llamatrain.adapters.options import AdapterOptions
from llamatrain.commands.opened_model import open_model
from llamatrain.sample.decoder import Decoder
from llamatrain.train import graphs
from tests.helpers.cli import TINY, Argument, ran, rows, run, tensors, text_file
from tests.run.test_from_scratch_errors import refused

CTX, ROWS = 32, 20
ROW = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models that learned for a different time, an adapter for the first, texts and chats."""
    place = tmp_path_factory.mktemp("compare")
    data = text_file(place, ROWS * CTX)
    shape = (*TINY, "--ctx", CTX, "--batch", 4, "--lr", 5e-3, "--eval-every", 0)
    for name, iters in (("a", 10), ("b", 60)):
        ran("from-scratch", data, *shape, "--iters", iters, "--out", place / name)
    (place / "chats.jsonl").write_text(
        "".join(json.dumps({"prompt": "abc" * n, "completion": "defg" * n}) + "\n" for n in range(1, 7))
    )
    base = place / "a" / "model.gguf"
    tune = ("--lora-r", 2, "--lr", 1e-2, "--iters", 12, "--eval-every", 0, "--ctx", CTX, "--batch", 4)
    ran("finetune", base, place / "chats.jsonl", *tune, "--out", place / "lora")
    return place


def compared(model: Path, *arguments: Argument) -> dict[str, float]:
    return json.loads(ran("evaluate", model, *arguments, "--ctx", CTX, "--json").out)


def decoder_logits(path: Path, row: ROW, lora: tuple[Path, ...] = ()) -> np.ndarray:
    """The logits of a row, one token after another, through the cache of a decoder."""
    model = open_model(path, AdapterOptions(lora=lora), 1, "cpu")
    decoder = Decoder(model.h, model.arrays, ctx=len(row["tokens"]), weights=model.weights)
    return np.array([decoder.feed([int(token)]).copy() for token in row["tokens"]])


def expectation(base: np.ndarray, model: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """The definitions, in float64: p and q are probabilities, not logarithms."""
    p, q = (np.exp(x.astype(np.float64)) for x in (base, model))
    p, q = (x / x.sum(1, keepdims=True) for x in (p, q))
    losses = [float(np.mean([-math.log(x[i, t]) for i, t in enumerate(targets)])) for x in (p, q)]
    return {
        "base": losses[0],
        "loss": losses[1],
        "kl_divergence": float(np.mean(np.sum(p * np.log(p / q), axis=1))),
        "agreement": float(np.mean(p.argmax(1) == q.argmax(1))),
    }


def same(found: dict[str, float], expected: dict[str, float]) -> None:
    base = found["base"]
    assert isinstance(base, dict)
    assert base["loss"] == pytest.approx(expected["base"], abs=1e-5)
    assert base["perplexity"] == pytest.approx(math.exp(expected["base"]), rel=1e-5)
    for name in ("loss", "kl_divergence", "agreement"):
        assert found[name] == pytest.approx(expected[name], abs=1e-5), name
    assert found["perplexity"] == pytest.approx(math.exp(expected["loss"]), rel=1e-5)


def test_adapter_against_decoder(place: Path) -> None:
    """Only the trained tokens of chats count."""
    base, adapter, data = place / "a" / "model.gguf", place / "lora" / "adapter.gguf", place / "chats.jsonl"
    found = compared(base, data, "--lora", adapter, "--compare", "base")
    shown = rows(6, data, "--model", base, "--ctx", CTX, "--no-pack")
    scored = [row["weights"] > 0 for row in shown]
    before, after = (
        np.concatenate(
            [decoder_logits(base, row, lora)[mask] for row, mask in zip(shown, scored, strict=True)]
        )
        for lora in ((), (adapter,))
    )
    targets = np.concatenate([row["targets"][mask] for row, mask in zip(shown, scored, strict=True)])
    same(found, expectation(before, after, targets))
    assert found["tokens"] == len(targets) and found["kl_divergence"] > 0.01
    # the name of the same file is the base as well, and its own evaluation has the same loss
    assert compared(base, data, "--lora", adapter, "--compare", base) == found
    assert compared(base, data)["loss"] == pytest.approx(found["base"]["loss"], abs=1e-6)  # type: ignore[index]
    assert compared(base, data, "--lora", adapter)["loss"] == pytest.approx(found["loss"], abs=1e-6)


@pytest.mark.reference
def test_models_against_torch(place: Path) -> None:
    torch = pytest.importorskip("torch")
    from tests.helpers.plain_llama import Numbers, logits, weights_of

    models, data = [place / name / "model.gguf" for name in "ab"], place / "text.txt"
    shown = rows(ROWS, data, "--model", models[0], "--ctx", CTX)
    trained = np.concatenate([row["weights"] for row in shown]) > 0
    targets = np.concatenate([row["targets"] for row in shown])[trained]
    with torch.no_grad():
        before, after = (
            logits(weights_of(tensors(model)), Numbers(4, 4), shown).flatten(0, 1).numpy()[trained]
            for model in models
        )
    found = compared(models[1], data, "--compare", models[0])
    same(found, expectation(before, after, targets))
    reverse = compared(models[0], data, "--compare", models[1])
    same(reverse, expectation(after, before, targets))
    assert abs(reverse["kl_divergence"] - found["kl_divergence"]) > 1e-3, "the direction matters"


def test_standard_error_of_samples(place: Path) -> None:
    """It is that of a ratio over rows: the mean of each row, weighted with its tokens."""
    models, data = [place / name / "model.gguf" for name in "ab"], place / "text.txt"
    found, each = compared(models[1], data, "--compare", models[0]), []
    for row in rows(ROWS, data, "--model", models[0], "--ctx", CTX):
        mask = row["weights"] > 0
        p, q = (np.exp(decoder_logits(model, row)[mask].astype(np.float64)) for model in models)
        p, q = (x / x.sum(1, keepdims=True) for x in (p, q))
        each.append((float(np.sum(p * np.log(p / q))), int(mask.sum())))
    sums, counts = np.array(each).T
    deviations = (sums - sums.sum() / counts.sum() * counts) / counts.sum()
    expected = math.sqrt(np.sum(deviations**2) * ROWS / (ROWS - 1))
    assert found["kl_divergence_error"] == pytest.approx(expected, rel=1e-3)


def test_chunks_and_batches_make_no_difference(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models, data = [place / name / "model.gguf" for name in "ab"], place / "chats.jsonl"
    found = compared(models[1], data, "--compare", models[0])
    monkeypatch.setattr(graphs, "LOGITS", 7 * 256)
    for more in ((), ("--batch", 1), ("--precision", "bf16")):
        other = compared(models[1], data, "--compare", models[0], *more)
        tolerance = 0.05 if "bf16" in more else 1e-5
        for name in ("loss", "kl_divergence"):
            assert other[name] == pytest.approx(found[name], abs=tolerance), name


@pytest.mark.reference
def test_other_devices(place: Path) -> None:
    pytest.importorskip("torch")
    models, data = [place / name / "model.gguf" for name in "ab"], place / "chats.jsonl"
    found, other = (
        compared(models[1], data, "--compare", models[0], "--device", device)
        for device in ("cpu", "torch-cpu")
    )
    for name in ("loss", "kl_divergence", "agreement"):
        assert other[name] == pytest.approx(found[name], abs=1e-5), name


def test_table_and_api(place: Path) -> None:
    models, data = [place / name / "model.gguf" for name in "ab"], place / "text.txt"
    lines = ran("evaluate", models[1], data, "--ctx", CTX, "--compare", models[0]).out.splitlines()
    assert lines[0].split() == ["base", "model", "change"]
    assert [line.split("  ")[0] for line in lines[1:]] == [
        *("loss", "perplexity", "bits per byte", "accuracy", "tokens"),
        *("KL(base || model)", "same likeliest token"),
    ]
    found = compared(models[1], data, "--compare", models[0])
    result = evaluate(models[1], data, ctx=CTX, compare=models[0])
    assert result.base and result.base.loss == found["base"]["loss"]  # type: ignore[index]
    assert result.kl_divergence == found["kl_divergence"] and result.agreement == found["agreement"]


def test_what_cannot_be_compared(place: Path, tmp_path: Path) -> None:
    model, data = place / "a" / "model.gguf", place / "text.txt"
    refused(run("evaluate", model, data, "--compare", "base"), 2, "--lora")
    refused(run("evaluate", model, data, "--compare", model), 2, "--lora")
    refused(run("evaluate", model, data, "--compare", tmp_path / "none.gguf"), 2, "none.gguf")
    refused(run("evaluate", model, data, "--compare", data), 1, "text.txt")
    (tmp_path / "damaged.gguf").write_bytes(model.read_bytes()[:5000])
    refused(run("evaluate", model, data, "--compare", tmp_path / "damaged.gguf"), 1, "damaged.gguf")
    ran(
        *("from-scratch", data, "--vocab-size", 300, "--embd", 32, "--head", 4, "--layer", 1, "--ff", 64),
        *("--ctx", CTX, "--iters", 0, "--out", tmp_path / "other"),
    )
    other = tmp_path / "other" / "model.gguf"
    refused(run("evaluate", model, data, "--compare", other), 2, "vocabulary", "model.gguf")
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    refused(
        run("evaluate", model, tmp_path / "pairs.jsonl", "--compare", other, "--objective", "orpo"),
        *(2, "--compare", "--objective"),
    )
