"""The scores of a trained reranker are those of llama-server with the adapter loaded."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llamatrain
from tests.helpers.cli import ran
from tests.helpers.llama_cpp import served
from tests.helpers.rerankers import reranker, rows_to_rank, with_head

TEXTS = ["the dog of a red", "not the moon of a tree", "a", "yes", "the fish of a bird sun sun"]


@pytest.mark.llama_cpp
def test_beside_llama_server(tmp_path: Path) -> None:
    model, out = with_head(reranker(tmp_path), tmp_path / "served.gguf"), tmp_path / "out"
    data = rows_to_rank(tmp_path / "groups.jsonl", 16)
    given = ("--objective", "rerank", "--ctx", 64, "--precision", "f32", "--iters", 6, "--lr", 3e-2)
    ran("finetune", model, data, *given, "--out", out)
    scores = []
    for adapter in (None, out / "adapter.gguf"):
        options: dict[str, Any] = {"lora": adapter} if adapter else {}
        scores.append(llamatrain.rerank(model, "red dog", TEXTS, ctx=64, **options))
        with served(model, adapter=adapter, pooling="rank") as server:
            told = server.post("rerank", query="red dog", documents=TEXTS)["results"]
        theirs = {result["index"]: result["relevance_score"] for result in told}
        np.testing.assert_allclose(scores[-1], [theirs[number] for number in range(len(TEXTS))], atol=2e-5)
    assert np.abs(scores[1] - scores[0]).max() > 1e-3
