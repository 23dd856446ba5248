"""`--objective rerank`: training on questions, `evaluate`, `llamatrain.rerank`, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

import llamatrain
from llamatrain.commands.divergence import log_softmax
from llamatrain.commands.rerank import Judgment
from llamatrain.data.encode import Encoder
from llamatrain.data.options import DataOptions
from llamatrain.data.rerank import QWEN3, fill_template, find_verdicts
from llamatrain.data.tokenizer import load
from llamatrain.gguf.reader import open_gguf
from tests.helpers.cli import Argument, Done, ran, run
from tests.helpers.mpi_programs import needs_mpi
from tests.helpers.multi_rank import done_by, job
from tests.helpers.rerankers import TEMPLATE, reranker, rows_to_rank, with_head, with_template
from tests.helpers.small_models import small, weights, written

GIVEN: tuple[Argument, ...] = ("--objective", "rerank", "--ctx", 64)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rerank")
    reranker(folder)
    rows_to_rank(folder / "groups.jsonl", 48)
    rows_to_rank(folder / "others.jsonl", 12, seed=1)
    return folder


def failed(done: Done, told: str, code: int) -> None:
    assert done.code == code and len(done.errors) == 1 and told in done.errors[0], done.err
    assert "Traceback" not in done.err


def evaluated(model: Path, *words: Argument) -> dict[str, float]:
    values: dict[str, float] = json.loads(ran("evaluate", model, *words, *GIVEN, "--json").out)
    return values


def test_a_row_asks_about_each_of_its_texts(place: Path) -> None:
    shown = ran("preview", place / "groups.jsonl", "--model", place / "m.gguf", *GIVEN, "--no-shuffle").out
    first = json.loads((place / "groups.jsonl").read_text().splitlines()[0])
    assert f"Query: {first['query']}" in shown and "Answer: " in shown
    tokenizer = load(open_gguf(place / "m.gguf").metadata, place / "m.gguf")
    encoder, verdicts = Encoder(tokenizer, DataOptions(), 64, "judged texts"), find_verdicts(tokenizer)
    question = fill_template(TEMPLATE, "red dog", "the dog")
    for answers, verdict in ((True, verdicts.yes), (False, verdicts.no)):
        row = encoder.encode_judged("red dog", "the dog", answers=answers)
        assert row.tokens[-1] == verdict and row.marks.tolist() == [0] * (len(row.tokens) - 1) + [1]
        assert tokenizer.decode(row.tokens[:-1]).decode() == question


def test_training_ranks_the_answer_higher(place: Path, tmp_path: Path) -> None:
    before = evaluated(place / "m.gguf", place / "groups.jsonl")
    words = ("--iters", 120, "--lr", 1e-2, "--batch", 16, "--lora-r", 8, "--seed", 1)
    ran("finetune", place / "m.gguf", place / "groups.jsonl", *GIVEN, *words, "--out", tmp_path / "run")
    after = evaluated(place / "m.gguf", place / "groups.jsonl", "--lora", tmp_path / "run" / "adapter.gguf")
    assert after["loss"] < 0.3 < 3 < before["loss"] and after["recall_at_1"] > 0.9 > before["recall_at_1"]
    assert after["queries"] == 48 and set(after) == set(before) >= {"mrr_at_10", "ndcg_at_10", "candidates"}
    table = ran("evaluate", place / "m.gguf", place / "others.jsonl", *GIVEN).out
    assert "recall at 1 " in table and "mrr at 10 " in table


def test_the_loss_is_that_of_training(place: Path, tmp_path: Path) -> None:
    """Validation during a run, and `evaluate` afterwards, ask the same questions."""
    run_of = llamatrain.finetune(
        place / "m.gguf",
        place / "groups.jsonl",
        out=tmp_path / "run",
        objective="rerank",
        ctx=64,
        iters=2,
        lr=1e-9,
        precision="f32",
        val=place / "others.jsonl",
        eval_every=2,
    )
    found = llamatrain.evaluate(place / "m.gguf", place / "others.jsonl", objective="rerank", ctx=64)
    assert found.loss == pytest.approx(run_of.validations[-1][1], rel=1e-5)


def test_scores_are_probabilities_of_yes_beside_no(place: Path) -> None:
    """Beside the logits of `generate`, and whatever the batch."""
    from llamatrain.adapters.load_adapted import load_with_adapters
    from llamatrain.adapters.options import AdapterOptions
    from llamatrain.commands.logit_diff import compute_logits

    texts = ["the dog of a red", "moon", "the fish of a bird sun sun sun"]
    gguf = open_gguf(place / "m.gguf")
    tokenizer = load(gguf.metadata, gguf.path)
    h, leaves, arrays = load_with_adapters(gguf, AdapterOptions(), 1)
    wanted, verdicts = [], find_verdicts(tokenizer)
    for text in texts:
        ids = [*map(int, tokenizer.encode(fill_template(TEMPLATE, "red dog", text), special=True))]
        logs = log_softmax(compute_logits(gguf, h, leaves, arrays, ids, 1))[-1]
        wanted.append(1 / (1 + np.exp(logs[verdicts.no] - logs[verdicts.yes])))
    for batch in (1, 2, 8):
        found = llamatrain.rerank(place / "m.gguf", "red dog", texts, ctx=64, batch=batch)
        np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_equal_scores_do_not_help_the_answer(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that gives every text the same score ranks the answer last."""
    judge = "llamatrain.commands.rerank.Judge.judge"
    monkeypatch.setattr(judge, lambda self, questions: [Judgment(0.5, 1.0)] * len(questions))
    found = llamatrain.evaluate(place / "m.gguf", place / "others.jsonl", objective="rerank", ctx=64)
    assert isinstance(found, llamatrain.Retrieval) and found.recall_at_1 == 0 and found.recall_at_5 == 1
    assert 1 / 4 <= found.mrr_at_10 <= 1 / 3


@needs_mpi
def test_ranks_share_the_questions(place: Path, tmp_path: Path) -> None:
    call = job("evaluate", place / "m.gguf", place / "others.jsonl", objective="rerank", ctx=64)
    (one,), (two,) = (done_by(ranks, [call], tmp_path) for ranks in (0, 2))
    assert one == two and one["queries"] == 12


def test_the_template_of_qwen_is_used_if_there_is_none(place: Path) -> None:
    base = place / "base" / "model.gguf"
    tokenizer = load(open_gguf(base).metadata, base)
    row = Encoder(tokenizer, DataOptions(), 512, "judged texts").encode_judged("what?", "that", answers=True)
    assert tokenizer.decode(row.tokens[:-1]).decode() == fill_template(QWEN3, "what?", "that")
    assert fill_template("{query}|{document}", "{document}", "x") == "{document}|x"


# ---- what is refused -------------------------------------------------------


def test_models_that_cannot_be_asked(place: Path, tmp_path: Path) -> None:
    h = small()
    written(tmp_path / "bytes.gguf", h, weights(h))
    data = place / "others.jsonl"
    failed(run("evaluate", tmp_path / "bytes.gguf", data, *GIVEN), "has no token for 'yes'", 2)
    words = ("--iters", 1, "--out", tmp_path / "run")
    failed(run("finetune", tmp_path / "bytes.gguf", data, *GIVEN, *words), "has no token for 'yes'", 2)
    with_template(place / "m.gguf", tmp_path / "bad.gguf", "{query} only")
    failed(run("evaluate", tmp_path / "bad.gguf", data, *GIVEN), "has no place for {query} and {document}", 2)


def test_classifiers(place: Path, tmp_path: Path) -> None:
    """That of llama.cpp's converter is the same model; another one is not trained."""
    data, good = place / "others.jsonl", with_head(place / "m.gguf", tmp_path / "good.gguf")
    assert evaluated(good, data) == evaluated(place / "m.gguf", data)
    width = open_gguf(good).tensors["token_embd.weight"].shape[-1]
    for name, head in (("one", np.ones((1, width))), ("other", np.ones((2, width)))):
        with_template(place / "m.gguf", tmp_path / f"{name}.gguf", head=head.astype(np.float32))
        failed(run("evaluate", tmp_path / f"{name}.gguf", data, *GIVEN), "is another classifier", 1)
        words = ("--iters", 1, "--out", tmp_path / "run")
        failed(run("finetune", tmp_path / f"{name}.gguf", data, *GIVEN, *words), "is another classifier", 1)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"query": "a"}, 'no "positive"'),
        ({"positive": "a"}, 'no "query"'),
        ({"query": "a", "positive": 3}, "expected a text"),
        ({"query": "a", "positive": "b", "negatives": ["b"]}, "also one of the negatives"),
        ({"query": "a", "positive": "b"}, "nothing to rank"),
        ({"query": "a", "positive": "b " * 200, "negatives": ["c"]}, "but a row has 64"),
    ],
)
def test_rows_of_no_use(row: dict[str, object], told: str, place: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(json.dumps(row) + "\n")
    done = run("evaluate", place / "m.gguf", tmp_path / "bad.jsonl", *GIVEN)
    failed(done, told, done.code)
    assert done.code in (1, 2)


def test_weights_that_are_not_finite(place: Path, tmp_path: Path) -> None:
    path = with_template(place / "m.gguf", tmp_path / "damaged.gguf")
    norm = open_gguf(path).tensors["output_norm.weight"].raw.tobytes()
    path.write_bytes(path.read_bytes().replace(norm, np.float32(np.nan).tobytes() + norm[4:]))
    failed(run("evaluate", path, place / "others.jsonl", *GIVEN), "the loss of an answer is not finite", 1)
    with pytest.raises(llamatrain.LlamatrainError, match="not finite"):
        llamatrain.rerank(path, "a", ["b"])


def test_options_of_no_use(place: Path, tmp_path: Path) -> None:
    data = place / "others.jsonl"
    (tmp_path / "t.txt").write_text("plain text\n" * 50)
    failed(run("evaluate", place / "m.gguf", tmp_path / "t.txt", *GIVEN), "plain text has no pairs", 1)
    failed(run("evaluate", place / "m.gguf", data, *GIVEN, "--pooling", "mean"), "--pooling", 2)
    failed(run("evaluate", place / "m.gguf", data, *GIVEN, "--compare", "base"), "exclude each other", 2)
    for texts in ("b", None, 3, [""], [3]):
        with pytest.raises(llamatrain.UsageError, match="texts must be a list"):
            llamatrain.rerank(place / "m.gguf", "a", texts)  # type: ignore[arg-type]
    with pytest.raises(llamatrain.UsageError, match="query must be a text that is not empty"):
        llamatrain.rerank(place / "m.gguf", "", ["b"])
