"""Runs that train embeddings: gradients beside torch, how a batch is cut, what is resumed, evaluated and refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llamatrain
from llamatrain.data.tokenizer import load
from llamatrain.gguf.reader import open_gguf
from tests.helpers import architecture_runs as runs
from tests.helpers import architecture_torch as theirs
from tests.helpers.architecture_family import Shape
from tests.helpers.architecture_models import rows, shape_of, trainable, weights
from tests.helpers.cli import Argument, metrics, ran, run, same_bits, steps, tensors, timeless
from tests.helpers.embedding_models import EMBEDDERS
from tests.helpers.groups import groups, torch_loss, write_groups
from tests.helpers.lora_runs import base
from tests.helpers.mpi_programs import needs_mpi
from tests.helpers.multi_rank import done_by, job
from tests.helpers.small_models import small
from tests.helpers.small_models import weights as small_weights

H = small(ctx=128)
CTX = 64
SAID: tuple[Argument, ...] = ("--objective", "contrastive", "--ctx", CTX, "--precision", "f32")
STEADY: tuple[Argument, ...] = ("--schedule", "constant", "--warmup", 0)
EMBEDDER = EMBEDDERS["gemma-embedding"]["a"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and groups."""
    place = tmp_path_factory.mktemp("contrastive")
    base(place / "base.gguf", H, arrays=small_weights(H))
    write_groups(place / "groups.jsonl", groups(64))
    write_groups(place / "others.jsonl", groups(16, (3,), seed=9))
    write_groups(place / "pairs.jsonl", groups(16, (0,)))
    write_groups(place / "plain.jsonl", [{"prompt": "a", "completion": "b"}])
    (place / "text.txt").write_text("Once upon a time. " * 200)
    return place


def tuned(place: Path, out: Path, *more: Argument, data: str = "groups.jsonl") -> Path:
    ran("finetune", place / "base.gguf", place / data, *SAID, *more, "--out", out)
    return out


# ---- gradients ---------------------------------------------------------------


def hidden_states(model: Any, ids: list[int]) -> Any:
    """Return the output of the last norm of Hugging Face's model."""
    import torch

    told = model(torch.tensor([ids]), output_hidden_states=True)
    return told.hidden_states[-1][0] if hasattr(told, "logits") else told.last_hidden_state[0]


POOL = {
    "last": lambda hidden: hidden[-1],
    "cls": lambda hidden: hidden[0],
    "mean": lambda hidden: hidden.mean(0),
}


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("shape", "pooling", "cut"),
    [
        (shape_of("qwen3", "a"), "last", ("--batch", 4)),
        (shape_of("qwen3", "a"), "mean", ("--batch", 1, "--grad-acc", 4)),
        (shape_of("qwen35", "a"), "last", ("--batch", 2, "--grad-acc", 2)),
        (EMBEDDER, "mean", ("--batch", 2, "--grad-acc", 2)),
        (EMBEDDER, "cls", ("--batch", 4)),
    ],
    ids=["last", "mean", "recurrent", "bidirectional mean", "bidirectional first"],
)
def test_gradients(shape: Shape, pooling: str, cut: tuple[Argument, ...], tmp_path: Path) -> None:
    """Compare the gradients of all weights with torch's, which sees each text alone."""
    torch = pytest.importorskip("torch")
    model, made = runs.base(tmp_path, shape), groups(4)
    said = (*SAID, *cut, "--pooling", pooling, "--contrast-temp", 0.2, "--matryoshka", 8, *STEADY)
    data = write_groups(tmp_path / "groups.jsonl", made)
    out = tmp_path / "out"
    ran("finetune", model, data, "--full", *said, *runs.SGD[:-2], "--lr", runs.HUGE, "--out", out)
    found = runs.changes(model, out / "model.gguf", shape)

    tokenizer = load(open_gguf(model).metadata, model)
    torch_model = theirs.model(shape, weights(shape, last=1.0))
    embeddings = [
        torch.stack(
            [
                POOL[pooling](
                    hidden_states(
                        torch_model, [tokenizer.bos, *tokenizer.encode(text, special=True).tolist()]
                    )
                )
                for text in (group["query"], group["positive"], *group["negatives"])
            ]
        )
        for group in made
    ]
    loss = torch_loss(embeddings, (embeddings[0].shape[1], 8), 0.2)
    loss.backward()
    assert steps(out)[0]["loss"] == pytest.approx(loss.item(), rel=1e-4)
    named = dict(torch_model.named_parameters())
    compared = 0
    for mine, (name, axes) in rows(shape).items():
        if mine in trainable(shape) and named[name.partition("#")[0]].grad is not None:
            expected = theirs.change_to_ours(
                shape, mine, theirs.stacked_gradient(named, shape, mine, name, axes[-2:][0])
            )
            largest = np.abs(expected).max()
            assert np.abs(found[mine] - expected).max() <= 2e-3 * largest + 1e-7, mine
            compared += largest > 0
    assert compared > 10


# ---- how a step is cut, and resumed --------------------------------------------


@pytest.mark.parametrize("cut", [(4, 4), (1, 16), (2, 8)])
def test_micro_batches_change_nothing(cut: tuple[int, int], place: Path, tmp_path: Path) -> None:
    """All texts of a step are compared, however many rows a micro-batch has."""
    given = ("--iters", 3, "--lr", 1e-2, *STEADY)
    whole = tuned(place, tmp_path / "whole", "--batch", 16, *given)
    parts = tuned(place, tmp_path / "parts", "--batch", cut[0], "--grad-acc", cut[1], *given)
    for one, other in zip(steps(whole), steps(parts), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert one["accuracy"] == other["accuracy"]


def test_large_batches_are_cut(place: Path, tmp_path: Path) -> None:
    """A step of many groups takes about the memory of one of a few."""
    given: tuple[Argument, ...] = ("--iters", 1, "--lr", 1e-2, *STEADY)
    cut = tuned(place, tmp_path / "cut", "--batch", 64, *given)
    whole = tuned(place, tmp_path / "whole", "--batch", 4, "--grad-acc", 16, *given)
    assert steps(cut)[0]["loss"] == pytest.approx(steps(whole)[0]["loss"], rel=1e-5)
    options = {"objective": "contrastive", "ctx": CTX, "precision": "f32"}
    small_step, large_step = (
        llamatrain.plan("finetune", place / "base.gguf", place / "groups.jsonl", batch=rows, **options)  # type: ignore[arg-type]
        for rows in (16, 256)
    )
    assert large_step.total < 1.2 * small_step.total


def test_resumed_run_has_the_same_bits(place: Path, tmp_path: Path) -> None:
    given: tuple[Argument, ...] = (
        "--batch",
        4,
        "--grad-acc",
        2,
        "--lr",
        1e-2,
        "--val",
        place / "others.jsonl",
    )
    given = (*given, "--eval-every", 2, "--save-every", 3)
    whole = tuned(place, tmp_path / "whole", *given, "--iters", 6)
    halves = tuned(place, tmp_path / "halves", *given, "--iters", 6, "--matryoshka", "")
    ran("finetune", "--resume", whole / "checkpoint-3.gguf", "--out", tmp_path / "again", "--iters", 6)
    same_bits(whole / "adapter.gguf", halves / "adapter.gguf")
    same_bits(whole / "adapter.gguf", tmp_path / "again" / "adapter.gguf")
    assert timeless(whole)[-2:] == timeless(tmp_path / "again")[-2:]


@needs_mpi
def test_ranks_give_the_same_bits(place: Path, tmp_path: Path) -> None:
    options = {
        "objective": "contrastive",
        "ctx": CTX,
        "batch": 8,
        "iters": 3,
        "precision": "f32",
        "grad_groups": 4,
    }
    options |= {"val": str(place / "others.jsonl"), "eval_every": 3, "lr": 1e-2}
    found = {
        ranks: done_by(
            ranks,
            [
                job(
                    "finetune",
                    place / "base.gguf",
                    place / "groups.jsonl",
                    out=tmp_path / str(ranks),
                    **options,
                )
            ],
            tmp_path,
        )[0]
        for ranks in (0, 2)
    }
    assert found[0]["losses"] == found[2]["losses"] and found[0]["validations"] == found[2]["validations"]
    same_bits(tmp_path / "0" / "adapter.gguf", tmp_path / "2" / "adapter.gguf")


# ---- what is learned -----------------------------------------------------------


def test_training_finds_more(place: Path, tmp_path: Path) -> None:
    """After training, positives of other groups are found more often, with and without the longer embeddings."""
    out = tuned(
        place, tmp_path / "out", "--batch", 16, "--iters", 120, "--lr", 2e-2, "--lora-r", 16, "--matryoshka", "16",
        "--val", place / "others.jsonl", "--eval-every", 30,
    )  # fmt: skip
    given: dict[str, Any] = {"objective": "contrastive", "ctx": CTX}
    scores = [
        llamatrain.evaluate(place / "base.gguf", place / "others.jsonl", **given, **adapter)
        for adapter in ({}, {"lora": out / "adapter.gguf"})
    ]
    before, after = scores
    assert isinstance(before, llamatrain.Retrieval) and isinstance(after, llamatrain.Retrieval)
    assert after.recall_at_10 > before.recall_at_10 + 0.3 and after.ndcg_at_10 > before.ndcg_at_10 + 0.2
    first, *_, last = (line for line in metrics(out) if "val_loss" in line)
    assert (
        last["val_loss"] < first["val_loss"] and last["val_answers"] == 16 and 0 <= last["val_accuracy"] <= 1
    )
    assert steps(out)[-1]["accuracy"] > steps(out)[0]["accuracy"]


def test_retrieval_scores_beside_a_plain_computation(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {"ctx": CTX, "pooling": "mean"}
    made = [
        *groups(16, (3,), seed=9),
        {"query": "red dog", "positive": "a"},
        {"query": "red dog", "positive": "b"},
    ]
    found = llamatrain.evaluate(place / "base.gguf", made, objective="contrastive", batch=5, **given)
    assert isinstance(found, llamatrain.Retrieval)
    queries = list(dict.fromkeys(group["query"] for group in made))
    texts = list(
        dict.fromkeys(text for group in made for text in (group["positive"], *group.get("negatives", [])))
    )
    answers = {query: {group["positive"] for group in made if group["query"] == query} for query in queries}
    left, right = (llamatrain.embed(place / "base.gguf", each, **given) for each in (queries, texts))
    recalls, reciprocals, gains = [], [], []
    for query, similarities in zip(queries, left @ right.T, strict=True):
        ranked = [texts[number] for number in np.argsort(-similarities, kind="stable")]
        hits = [rank for rank, text in enumerate(ranked, 1) if text in answers[query]]
        recalls.append([sum(hit <= limit for hit in hits) / len(hits) for limit in (1, 5, 10)])
        reciprocals.append(1 / hits[0] if hits[0] <= 10 else 0)
        best = sum(1 / np.log2(1 + rank) for rank in range(1, min(10, len(hits)) + 1))
        gains.append(sum(1 / np.log2(1 + hit) for hit in hits if hit <= 10) / best)
    assert (found.queries, found.candidates) == (len(queries), len(texts))
    expected = [*np.mean(recalls, 0), np.mean(reciprocals), np.mean(gains)]
    told = [found.recall_at_1, found.recall_at_5, found.recall_at_10, found.mrr_at_10, found.ndcg_at_10]
    assert told == pytest.approx(expected, abs=1e-12)


def test_scores_on_the_command_line(place: Path) -> None:
    given = (
        "evaluate",
        place / "base.gguf",
        place / "others.jsonl",
        "--objective",
        "contrastive",
        "--ctx",
        CTX,
    )
    table = dict(line.rsplit(maxsplit=1) for line in ran(*given).out.replace(" %", "%").splitlines())
    values = json.loads(ran(*given, "--json").out)
    names = [f"recall_at_{limit}" for limit in (1, 5, 10)]
    assert list(values) == ["loss", "tokens", *names, "mrr_at_10", "ndcg_at_10", "queries", "candidates"]
    assert {name.strip() for name in table} == {name.replace("_", " ") for name in values}
    shown = {name.strip().replace(" ", "_"): value for name, value in table.items()}
    assert shown["recall_at_10"] == f"{100 * values['recall_at_10']:.2f}%"


def test_embeddings_have_length_one_whatever_the_batch(place: Path) -> None:
    texts = ["a", "the moon of a tree", "x" * 200, "red"]
    one, several = (llamatrain.embed(place / "base.gguf", texts, batch=batch, ctx=CTX) for batch in (1, 3))
    assert np.linalg.norm(one, axis=1) == pytest.approx(np.ones(4), abs=1e-6)
    np.testing.assert_allclose(one, several, atol=1e-6)
    assert np.abs(one @ one.T - np.eye(4)).max() > 0.01


def test_full_training_states_the_pooling(place: Path, tmp_path: Path) -> None:
    out = tuned(place, tmp_path / "out", "--full", "--pooling", "mean", "--batch", 4, "--iters", 1)
    assert open_gguf(out / "model.gguf").metadata["llama.pooling_type"] == 1
    told = llamatrain.embed(out / "model.gguf", ["a b c"])
    np.testing.assert_array_equal(told, llamatrain.embed(out / "model.gguf", ["a b c"], pooling="mean"))


# ---- other commands ------------------------------------------------------------


def test_plan_and_preview(place: Path) -> None:
    planned = ran("plan", "finetune", place / "base.gguf", place / "groups.jsonl", *SAID, "--batch", 16)
    assert "MB" in planned.out
    shown = ran(
        "preview", place / "groups.jsonl", "--model", place / "base.gguf", "--objective", "contrastive"
    )
    assert "the" in shown.out


REFUSED = {
    "plain text": ("{place}/text.txt", "", "no-group"),
    "other rows": ("{place}/plain.jsonl", "", "no-group"),
    "one row": ("{place}/groups.jsonl", "--batch 1", "batch-too-small"),
    "dropout": ("{place}/groups.jsonl", "--lora-dropout 0.1", "conflicting-options"),
    "packing": ("{place}/groups.jsonl", "--pack", "objective-packs-nothing"),
    "a minimizer": ("{place}/groups.jsonl", "--optimizer lbfgs", "objective-needs-rate"),
    "a size that is no number": ("{place}/groups.jsonl", "--matryoshka 8,x", "invalid-option"),
    "a size that is too large": ("{place}/groups.jsonl", "--matryoshka 4096", "too-large"),
    "no temperature": ("{place}/groups.jsonl", "--contrast-temp 0", "invalid-option"),
    "an option of preferences": ("{place}/groups.jsonl", "--beta 0.1", "unused-option"),
    "an option of text": ("{place}/groups.jsonl", "--train-on all", "unused-option"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, place: Path, tmp_path: Path) -> None:
    """In one line, before anything is written."""
    data, more, code = REFUSED[name]
    out = tmp_path / "out"
    done = run("finetune", place / "base.gguf", data.format(place=place), *SAID, *more.split(), "--out", out)
    (error,) = done.errors
    assert done.code in (1, 2) and error.endswith(f"[{code}]"), error
    assert not out.exists()


def test_options_need_the_objective(place: Path, tmp_path: Path) -> None:
    done = run(
        "finetune", place / "base.gguf", place / "text.txt", "--pooling", "mean", "--out", tmp_path / "out"
    )
    (error,) = done.errors
    assert done.code == 2 and "--objective contrastive" in error


def test_bad_rows_can_be_skipped(place: Path, tmp_path: Path) -> None:
    data = tmp_path / "some.jsonl"
    data.write_text((place / "pairs.jsonl").read_text() + '{"query": "a"}\n{"query": "a", "positive": ""}\n')
    done = run("finetune", place / "base.gguf", data, *SAID, "--iters", 1, "--out", tmp_path / "refused")
    (error,) = done.errors
    assert done.code == 1 and "some.jsonl, line 17" in error and "--skip-bad-rows" in error
    done = ran(
        "finetune",
        place / "base.gguf",
        data,
        *SAID,
        "--iters",
        1,
        "--skip-bad-rows",
        "--out",
        tmp_path / "out",
    )
    assert "16 groups" in done.err
    assert tensors(tmp_path / "out" / "adapter.gguf")


def test_no_perplexity_of_similarities(place: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"objective": "contrastive", "ctx": CTX, "batch": 4, "iters": 1}
    made = llamatrain.finetune(
        place / "base.gguf",
        place / "groups.jsonl",
        val=[place / "others.jsonl"],
        out=tmp_path / "out",
        **given,
    )
    assert made.validations and made.perplexity is None
