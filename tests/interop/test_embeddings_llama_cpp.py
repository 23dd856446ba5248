"""Embeddings of trained adapters beside llama-server's, and scores beside sentence-transformers'."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llamatrain
from tests.helpers import architecture_runs as runs
from tests.helpers.architecture_family import Shape
from tests.helpers.architecture_models import shape_of
from tests.helpers.cli import ran
from tests.helpers.embedding_models import EMBEDDERS
from tests.helpers.groups import groups, write_groups
from tests.helpers.llama_cpp import served

CTX = 64
TEXTS = ["red dog", "the moon of a tree", "a", "the fish of a bird sun sun", "x y z"]
CASES = [
    (shape_of("qwen3", "a"), "last", 1e-5),
    (shape_of("qwen3", "b"), "mean", 1e-5),
    (shape_of("llama", "a"), "cls", 1e-5),
    (EMBEDDERS["gemma-embedding"]["a"], "mean", 2e-3),  # llama.cpp's gelu is a table of half floats
]


@pytest.mark.llama_cpp
@pytest.mark.parametrize(("shape", "pooling", "near"), CASES, ids=lambda value: getattr(value, "arch", value))
def test_beside_llama_server(shape: Shape, pooling: str, near: float, tmp_path: Path) -> None:
    """With the adapter loaded, and without it."""
    model, out = runs.base(tmp_path, shape), tmp_path / "out"
    data = write_groups(tmp_path / "groups.jsonl", groups(16))
    given = ("--objective", "contrastive", "--pooling", pooling, "--ctx", CTX, "--precision", "f32")
    ran("finetune", model, data, *given, "--iters", 8, "--lr", 3e-2, "--batch", 8, "--out", out)
    embeddings = []
    for adapter in (None, out / "adapter.gguf"):
        options: dict[str, Any] = {"lora": adapter} if adapter else {}
        embeddings.append(llamatrain.embed(model, TEXTS, pooling=pooling, ctx=CTX, **options))
        with served(model, adapter=adapter, pooling=pooling) as server:
            told = [
                server.post("embedding", content=text, embd_normalize=2)[0]["embedding"][0] for text in TEXTS
            ]
        assert np.abs(np.array(told) - embeddings[-1]).max() <= near
    assert np.abs(embeddings[1] - embeddings[0]).max() > 50 * near


@pytest.mark.llama_cpp
def test_file_that_states_its_pooling(tmp_path: Path) -> None:
    """A model that was trained whole needs no option of the server or of ours."""
    model, out = runs.base(tmp_path, shape_of("qwen3", "a")), tmp_path / "out"
    data = write_groups(tmp_path / "groups.jsonl", groups(16))
    given = ("--objective", "contrastive", "--full", "--pooling", "mean", "--ctx", CTX, "--precision", "f32")
    ran("finetune", model, data, *given, "--iters", 4, "--lr", 1e-2, "--batch", 8, "--out", out)
    with served(out / "model.gguf", pooling="unspecified") as server:
        told = [server.post("embedding", content=text, embd_normalize=2)[0]["embedding"][0] for text in TEXTS]
    assert np.abs(np.array(told) - llamatrain.embed(out / "model.gguf", TEXTS, ctx=CTX)).max() <= 1e-5


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore")
def test_scores_of_sentence_transformers(tmp_path: Path) -> None:
    """Its evaluator takes our embeddings."""
    evaluation = pytest.importorskip("sentence_transformers.sentence_transformer.evaluation")
    torch = pytest.importorskip("torch")
    model = runs.base(tmp_path, shape_of("qwen3", "a"))
    made = [
        *groups(40, (2, 0, 1)),
        {"query": "red dog", "positive": "a"},
        {"query": "red dog", "positive": "b"},
    ]
    found = llamatrain.evaluate(model, made, objective="contrastive", ctx=CTX)
    queries = list(dict.fromkeys(group["query"] for group in made))
    texts = list(
        dict.fromkeys(text for group in made for text in (group["positive"], *group.get("negatives", ())))
    )
    answers = {
        str(number): {str(texts.index(group["positive"])) for group in made if group["query"] == query}
        for number, query in enumerate(queries)
    }

    evaluator = evaluation.InformationRetrievalEvaluator(
        {str(number): query for number, query in enumerate(queries)},
        {str(number): text for number, text in enumerate(texts)},
        answers,
        mrr_at_k=[10],
        ndcg_at_k=[10],
        precision_recall_at_k=[1, 5, 10],
        score_functions={"cos": lambda left, right: left @ right.T},
    )
    ranked = {"cos": []}  # as `compute_metrics` takes them: the first ten texts of each query
    left, right = (torch.from_numpy(llamatrain.embed(model, each, ctx=CTX)) for each in (queries, texts))
    for similarities in left @ right.T:
        order = torch.argsort(-similarities, stable=True)[:10].tolist()
        ranked["cos"].append(
            [{"corpus_id": str(number), "score": float(similarities[number])} for number in order]
        )
    scores = evaluator.compute_metrics(ranked["cos"])
    assert isinstance(found, llamatrain.Retrieval)
    told = [found.recall_at_1, found.recall_at_5, found.recall_at_10, found.mrr_at_10, found.ndcg_at_10]
    expected = [
        *(scores["recall@k"][limit] for limit in (1, 5, 10)),
        scores["mrr@k"][10],
        scores["ndcg@k"][10],
    ]
    assert told == pytest.approx(expected, abs=1e-9)
