"""`evaluate`: the loss of a model on data, as training sees it, and as llama.cpp does."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.cli import TINY, Argument, ran, rows, run, steps, tensors, text_file
from tests.helpers.lora_runs import random_adapter
from tests.helpers.small_models import small
from tests.run.test_from_scratch_errors import refused

CTX = 32


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with some data and a model that has begun to learn it."""
    place = tmp_path_factory.mktemp("evaluate")
    data = text_file(place, 2000)
    ran(
        "from-scratch",
        data,
        *TINY,
        "--ctx",
        CTX,
        "--batch",
        4,
        "--iters",
        60,
        "--lr",
        5e-3,
        "--out",
        place / "run",
    )
    (place / "chats.jsonl").write_text(
        "".join(json.dumps({"prompt": "abc" * n, "completion": "defg" * n}) + "\n" for n in range(1, 7))
    )
    return place


def evaluated(model: Path, *arguments: Argument) -> dict[str, float]:
    done = ran("evaluate", model, *arguments, "--json")
    assert done.out.count("\n") == 1
    return json.loads(done.out)


def test_the_keys_and_what_they_mean(place: Path) -> None:
    data = place / "text.txt"
    found = evaluated(place / "run" / "model.gguf", data, "--ctx", CTX)
    assert list(found) == [
        *("loss", "perplexity", "bits_per_byte", "tokens"),
        *("loss_error", "accuracy", "accuracy_error"),
    ]
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]), rel=1e-6)
    size = len(data.read_bytes())
    assert type(found["tokens"]) is int and size - 1 <= found["tokens"] <= size + 1
    trained_bytes = found["tokens"]  # a token is a byte
    assert found["bits_per_byte"] == pytest.approx(
        found["loss"] * found["tokens"] / math.log(2) / trained_bytes, rel=2e-3
    )
    assert 0 < found["loss"] < math.log(256)


def test_for_people(place: Path) -> None:
    done = ran("evaluate", place / "run" / "model.gguf", place / "text.txt", "--ctx", CTX)
    found = evaluated(place / "run" / "model.gguf", place / "text.txt", "--ctx", CTX)
    said = done.out + done.err
    assert "loss" in said and "perplexity" in said
    assert any(abs(float(number) - found["loss"]) < 0.01 for number in re.findall(r"\d+\.\d+", said))


@pytest.mark.parametrize("name", ["text.txt", "chats.jsonl"])
def test_it_is_the_loss_of_training(name: str, place: Path, tmp_path: Path) -> None:
    """One step over all rows at once has as its loss what `evaluate` says of the first weights."""
    data, shape = place / name, (*TINY, "--ctx", CTX, "--seed", 4, "--no-pack")
    ran("from-scratch", data, *shape, "--iters", 0, "--out", tmp_path / "first")
    model = tmp_path / "first" / "model.gguf"
    found = evaluated(model, data, "--ctx", CTX, "--precision", "f32")
    count = -(-len(data.read_bytes()) // CTX) if name == "text.txt" else 6
    ran("from-scratch", data, *shape, "--batch", count, "--iters", 1, "--out", tmp_path / "run")
    assert found["loss"] == pytest.approx(steps(tmp_path / "run")[0]["loss"], abs=2e-6)
    if name == "chats.jsonl":
        assert found["tokens"] < steps(tmp_path / "run")[0]["tokens"], "only what is trained counts"


def test_the_batch_does_not_matter(place: Path) -> None:
    model, data = place / "run" / "model.gguf", place / "text.txt"
    one, other = (evaluated(model, data, "--ctx", CTX, "--batch", batch) for batch in (1, 7))
    assert one["tokens"] == other["tokens"] and one["loss"] == pytest.approx(other["loss"], abs=1e-5)


def test_masks_are_those_of_training(place: Path) -> None:
    model, data = place / "run" / "model.gguf", place / "chats.jsonl"
    answers, all_of_it = (
        evaluated(model, data, "--ctx", CTX, "--train-on", which) for which in ("completion", "all")
    )
    assert answers["tokens"] < all_of_it["tokens"] and answers["loss"] != all_of_it["loss"]


@pytest.mark.reference
def test_against_plain_torch(place: Path) -> None:
    from tests.helpers.plain_llama import Numbers, loss, weights_of

    model, data = place / "run" / "model.gguf", place / "text.txt"
    shown = rows(-(-2000 // CTX), data, "--model", model, "--ctx", CTX)
    found = evaluated(model, data, "--ctx", CTX, "--precision", "f32")
    assert found["loss"] == pytest.approx(
        loss(weights_of(tensors(model)), Numbers(4, 4), shown).item(), abs=1e-5
    )
    assert found["tokens"] == sum(int(row["weights"].sum()) for row in shown)


@pytest.mark.llama_cpp
def test_against_llama_cpp(place: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    model, data = place / "run" / "model.gguf", place / "text.txt"
    theirs = llama_cpp.Llama(
        str(model), n_ctx=64, logits_all=True, type_k=0, type_v=0, n_threads=1, verbose=False
    )
    total = count = 0.0
    for row in rows(-(-2000 // CTX), data, "--model", model, "--ctx", CTX):
        theirs.reset()
        theirs.eval(row["tokens"].tolist())
        scores = np.array(theirs.scores[: len(row["tokens"])], np.float64)
        top = scores.max(-1)
        each = (
            np.log(np.exp(scores - top[:, None]).sum(-1))
            + top
            - scores[np.arange(len(scores)), row["targets"]]
        )
        total, count = total + float((each * row["weights"]).sum()), count + float(row["weights"].sum())
    theirs.close()
    assert evaluated(model, data, "--ctx", CTX)["loss"] == pytest.approx(total / count, abs=1e-3)


def test_what_cannot_be_evaluated(place: Path) -> None:
    model, data = place / "run" / "model.gguf", place / "text.txt"
    refused(run("evaluate", model, place / "none.txt"), 2, "none.txt")
    refused(run("evaluate", place / "none.gguf", data), 2, "none.gguf")
    refused(run("evaluate", data, data), 1, "text.txt")
    refused(run("evaluate", model, data, "--ctx", 0), 2, "--ctx")
    refused(run("evaluate", model, data, "--batch", 0), 2, "--batch")
    adapter = random_adapter(place / "a.gguf", small(), ["blk.0.attn_q.weight"])
    refused(run("evaluate", adapter, data), 1, "a.gguf", "not-a-model")
    refused(run("generate", adapter), 1, "a.gguf", "not-a-model")
    (place / "empty.txt").write_text("")
    refused(run("evaluate", model, place / "empty.txt"), 1)
