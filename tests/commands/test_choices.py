"""`evaluate --choices`: questions as their data sets have them, scored as lm-evaluation-harness does."""

import json
import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llamatrain import evaluate
from llamatrain.adapters.options import AdapterOptions
from llamatrain.commands import choices
from llamatrain.commands.choices import (
    encode_choice,
    encode_questions,
    read_questions,
    sum_log_probabilities,
)
from llamatrain.commands.opened_model import OpenedModel, open_model
from llamatrain.data.choice_records import Choice, clean_wikihow, parse_question
from llamatrain.errors import DataError
from llamatrain.sample.decoder import Decoder
from tests.helpers.cli import Argument, ran, run
from tests.run.test_from_scratch_errors import refused

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "then",
    "it",
    "went",
    "to",
    "sleep",
    "near",
    "big",
    "red",
]
CTX = 96
Row = dict[str, Any]


def sentence(random: np.random.Generator, count: int) -> str:
    return " ".join(random.choice(WORDS, count))


def hellaswag(random: np.random.Generator) -> Row:
    first, second = sentence(random, 5) + ".", sentence(random, 2)
    return {
        "activity_label": "Home [header]",
        "ctx_a": f"[title] {first} [step] Begin",
        "ctx_b": second,
        "ctx": f"[title] {first} [step] Begin {second}",
        "endings": [f"{sentence(random, int(count))}. [substeps] [é]" for count in random.integers(1, 7, 4)],
        "label": str(random.integers(4)),
    }


def winogrande(random: np.random.Generator) -> Row:
    return {
        "sentence": f"{sentence(random, 4)} because _ {sentence(random, 3)} .",
        "option1": random.choice(WORDS),
        "option2": sentence(random, 2),
        "answer": str(random.integers(1, 3)),
    }


def arc(random: np.random.Generator) -> Row:
    labels = ["1", "2", "3"] if random.random() < 0.3 else ["A", "B", "C", "D"]
    texts = [sentence(random, int(random.integers(1, 5))) for _ in labels]
    return {
        "id": "x",
        "question": sentence(random, 6) + "?",
        "choices": {"text": texts, "label": labels},
        "answerKey": str(random.choice(labels)),
    }


def plain(random: np.random.Generator) -> Row:
    return {
        "context": sentence(random, 4) + random.choice(["", " "]),
        "choices": [sentence(random, int(random.integers(1, 5))) + "é" for _ in range(3)],
        "answer": int(random.integers(3)),
    }


MAKERS = {"hellaswag": hellaswag, "winogrande": winogrande, "arc": arc, "choices": plain}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a vocabulary of words that begin with a space, and a file of questions of each kind."""
    place = tmp_path_factory.mktemp("choices")
    random = np.random.default_rng(5)
    (place / "text.txt").write_text(". ".join(sentence(random, 9) for _ in range(300)))
    ran(
        *("from-scratch", place / "text.txt", "--vocab-size", 300, "--embd", 32, "--head", 4, "--layer", 2),
        *("--ff", 64, "--ctx", CTX, "--iters", 40, "--lr", 5e-3, "--eval-every", 0, "--precision", "f32"),
        *("--out", place / "run"),
    )
    for name, make in MAKERS.items():
        write(place / f"{name}.jsonl", [make(random) for _ in range(12)])
    return place


def write(path: Path, rows: Sequence[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def scored(place: Path, *arguments: Argument) -> list[dict[str, Any]]:
    done = ran("evaluate", place / "run" / "model.gguf", *arguments, "--json")
    return json.loads(done.out)["choices"]


# ---- the formulas of lm-evaluation-harness, once more --------------------------------


def requests(kind: str, row: Row) -> tuple[list[tuple[str, str]], list[str], int]:
    """The pairs of context and continuation, the choices whose length counts, and the right one."""
    import re

    def cleaned(text: str) -> str:
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    if kind == "hellaswag":
        context = cleaned(row["activity_label"] + ": " + row["ctx_a"] + " " + row["ctx_b"].capitalize())
        endings = [cleaned(ending) for ending in row["endings"]]
        return [(context, " " + ending) for ending in endings], endings, int(row["label"])
    if kind == "winogrande":
        gap = row["sentence"].index("_")
        contexts = [row["sentence"][:gap] + row[name] for name in ("option1", "option2")]
        rest = " " + row["sentence"][gap + 1 :].strip()
        return [(context, rest) for context in contexts], contexts, {"1": 0, "2": 1}[row["answer"]]
    if kind == "arc":
        context, texts = f"Question: {row['question']}\nAnswer:", row["choices"]["text"]
        gold = row["choices"]["label"].index(row["answerKey"])
        return [(context, f" {text}") for text in texts], texts, gold
    return [(row["context"], f" {text}") for text in row["choices"]], row["choices"], row["answer"]


def encode_pair(model: OpenedModel, context: str, continuation: str) -> tuple[list[int], list[int]]:
    spaces = len(context) - len(context.rstrip())
    if spaces:
        continuation, context = context[-spaces:] + continuation, context[:-spaces]
    whole, first = (tokens_of(model, text) for text in (context + continuation, context))
    return first, whole[len(first) :]


def tokens_of(model: OpenedModel, text: str) -> list[int]:
    bos = [model.tokenizer.bos] if model.tokenizer.add_bos else []
    return [*bos, *model.tokenizer.encode(text).tolist()]  # type: ignore[list-item]


def log_probability(model: OpenedModel, context: list[int], continuation: list[int]) -> float:
    """One token after another through the cache of a decoder, in float64."""
    tokens = [*context, *continuation][-(CTX + 1) :]
    decoder, total = Decoder(model.h, model.arrays, ctx=CTX, weights=model.weights), 0.0
    for position, (token, target) in enumerate(pairwise(tokens)):
        logits = decoder.feed([token]).astype(np.float64)
        if position >= len(tokens) - 1 - len(continuation):
            total += logits[target] - logits.max() - math.log(np.exp(logits - logits.max()).sum())
    return total


@pytest.mark.parametrize("kind", MAKERS)
def test_scores_are_those_of_the_formulas(kind: str, place: Path) -> None:
    model = open_model(place / "run" / "model.gguf", AdapterOptions(), 1, "cpu")
    acc, norm = [], []
    for line in (place / f"{kind}.jsonl").read_text().splitlines():
        pairs, texts, gold = requests(kind, json.loads(line))
        sums = np.array([log_probability(model, *encode_pair(model, *pair)) for pair in pairs])
        acc.append(int(sums.argmax()) == gold)
        norm.append(int((sums / [float(len(choice)) for choice in texts]).argmax()) == gold)
    (found,) = scored(place, "--choices", place / f"{kind}.jsonl")
    assert found["task"] == kind and found["questions"] == 12
    assert found["acc"] == pytest.approx(np.mean(acc))
    assert found["acc_error"] == pytest.approx(np.std(acc, ddof=1) / math.sqrt(12))
    if kind == "winogrande":
        assert found["acc_norm"] is None
    else:
        assert found["acc_norm"] == pytest.approx(np.mean(norm))
        assert found["acc_norm_error"] == pytest.approx(np.std(norm, ddof=1) / math.sqrt(12))


def test_sums_of_log_probabilities(place: Path) -> None:
    """Each sum by itself, however questions are packed into rows."""
    model = open_model(place / "run" / "model.gguf", AdapterOptions(), 1, "cpu")
    file = read_questions(place / "hellaswag.jsonl", None)
    segments = encode_questions(file, model.tokenizer, CTX)
    expected = [
        log_probability(model, *encode_pair(model, *pair))
        for line in (place / "hellaswag.jsonl").read_text().splitlines()
        for pair in requests("hellaswag", json.loads(line))[0]
    ]
    for room, batch in ((CTX, 1), (400, 3)):
        programs = model.make_programs([room], batch, "f32", has_untrained_tokens=True)
        sums = sum_log_probabilities(programs, segments, room, "it")
        assert sums == pytest.approx(np.array(expected), abs=2e-4)
    assert any(len(segment.tokens) == CTX for segment in segments) is False


def test_ranks_share_the_batches(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of two ranks, each of which knows its own, are those of one."""
    model = open_model(place / "run" / "model.gguf", AdapterOptions(), 1, "cpu")
    segments = encode_questions(read_questions(place / "arc.jsonl", None), model.tokenizer, CTX)
    programs = model.make_programs([CTX], 2, "f32", has_untrained_tokens=True)
    whole = sum_log_probabilities(programs, segments, CTX, "it")
    parts = []
    for rank in range(2):
        comm = SimpleNamespace(rank=rank, size=2, all_gather=lambda own: [own])
        monkeypatch.setattr(choices, "get_comm", lambda comm=comm: comm)
        parts.append(sum_log_probabilities(programs, segments, CTX, "it"))
    assert all(part.any() for part in parts) and not (parts[0] * parts[1]).any()
    assert np.array_equal(parts[0] + parts[1], whole)


@pytest.mark.parametrize("kind", ["hellaswag", "winogrande", "arc"])
def test_against_lm_evaluation_harness(kind: str, place: Path, tmp_path: Path) -> None:
    """The program itself, with its task files, and with our tokens and logits."""
    pytest.importorskip("lm_eval")
    import yaml
    from lm_eval import simple_evaluate, tasks
    from lm_eval.api.model import TemplateLM

    model = open_model(place / "run" / "model.gguf", AdapterOptions(), 1, "cpu")

    class Ours(TemplateLM):
        @property
        def eot_token_id(self) -> int:
            return model.tokenizer.eos or 0

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **more: Any) -> list[int]:
            return tokens_of(model, string)

        def _loglikelihood_tokens(self, requests: Any, **more: Any) -> list[tuple[float, bool]]:
            return [(log_probability(model, context, rest), False) for _, context, rest in requests]

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            raise NotImplementedError

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            raise NotImplementedError

    name, folder = {"arc": ("arc_easy", "arc")}.get(kind, (kind, kind))
    source = Path(tasks.__file__).parent / folder
    if kind != "arc":
        sys.path.insert(0, str(source))
    text = (source / ("default.yaml" if kind == "winogrande" else f"{name}.yaml")).read_text()
    for line in (source / "utils.py", source / "preprocess_winogrande.py"):
        if line.exists():
            (tmp_path / line.name).write_text(line.read_text())
    data = {"dataset_path": "json", "dataset_name": None, "training_split": None, "test_split": None}
    data |= {"validation_split": "train", "dataset_kwargs": {"data_files": str(place / f"{kind}.jsonl")}}
    head, changed = text.split("metadata:")[0], [*data]
    kept = "\n".join(part for part in head.splitlines() if part.split(":")[0] not in changed)
    (tmp_path / "task.yaml").write_text(kept.replace(f"task: {name}", "task: ours") + "\n" + yaml.dump(data))
    manager = tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)
    theirs = simple_evaluate(
        Ours(), tasks=["ours"], task_manager=manager, bootstrap_iters=0, cache_requests=False
    )
    found, results = scored(place, "--choices", place / f"{kind}.jsonl")[0], theirs["results"]["ours"]
    assert found["acc"] == pytest.approx(results["acc,none"])
    if kind != "winogrande":
        assert found["acc_norm"] == pytest.approx(results["acc_norm,none"])


# ---- what is read ----------------------------------------------------------------------


def pairs_of(row: Row) -> list[tuple[str, str, int]]:
    _, question = parse_question(json.dumps(row).encode(), "it:1")
    return [(choice.context, choice.continuation, choice.size) for choice in question.choices]


def test_texts_of_questions() -> None:
    row = {"activity_label": "A", "ctx": "[x] b  c", "endings": ["d [title] e", "f"], "label": 1}
    assert pairs_of(row) == [("A: b c", " d. e", 4), ("A: b c", " f", 1)]
    row = {"sentence": "It is _ that", "option1": "x", "option2": "yz", "answer": "2"}
    assert pairs_of(row) == [("It is x", " that", 7), ("It is yz", " that", 8)]
    row = {"question": "Who?", "choices": ["é", "ab"], "answer": "ab"}
    assert pairs_of(row) == [("Question: Who?\nAnswer:", " é", 1), ("Question: Who?\nAnswer:", " ab", 2)]
    for answer, index in ((1, 1), ("0", 0), ("ab", 1)):
        assert parse_question(json.dumps(row | {"answer": answer}).encode(), "it:1")[1].answer == index


def test_brackets_are_removed_as_their_pattern_does() -> None:
    import re

    random = np.random.default_rng(1)
    for _ in range(500):
        text = "".join(random.choice([*"[] \nab", " [title]"], 12))
        expected = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")
        assert clean_wikihow(text) == expected, text
    assert len(clean_wikihow("]" + "[" * 10**6)) == 10**6 + 1


def test_spaces_belong_to_the_continuation(place: Path) -> None:
    """A token of a word has the space before it."""
    tokenizer = open_model(place / "run" / "model.gguf", AdapterOptions(), 1, "cpu").tokenizer
    one, other = (
        encode_choice(Choice(context, rest, 1), tokenizer, CTX)
        for context, rest in (("the cat", " sat"), ("the cat ", "sat"))
    )
    assert one[1] == other[1] and one[0].tolist() == other[0].tolist()
    tokens, count = encode_choice(Choice("", "sat", 1), tokenizer, CTX)
    assert count == len(tokens) - 1, "the first token is predicted, too"


def test_long_contexts_are_cut_from_the_left(place: Path, tmp_path: Path) -> None:
    row = {"context": "sea " * 200 + "the cat", "choices": ["sat", "on a mat"], "answer": 0}
    data = write(tmp_path / "long.jsonl", [row])
    done = ran("evaluate", place / "run" / "model.gguf", "--choices", data)
    assert "2 choices reach the context of 96 tokens" in done.err
    refused(run("evaluate", place / "run" / "model.gguf", "--choices", data, "--ctx", 2), 1, "tokens")


@pytest.mark.parametrize("kind", MAKERS)
def test_parquet_files(kind: str, place: Path, tmp_path: Path) -> None:
    """Hugging Face has these data sets in this format, with more columns."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [json.loads(line) for line in (place / f"{kind}.jsonl").read_text().splitlines()]
    table = pyarrow.Table.from_pylist([row | {"source_id": "x", "split": "val"} for row in rows])
    parquet.write_table(table, tmp_path / f"{kind}.jsonl.parquet")
    found, expected = (
        read_questions(path, None) for path in (tmp_path / f"{kind}.jsonl.parquet", place / f"{kind}.jsonl")
    )
    assert found.questions == expected.questions and found.task == kind
    parquet.write_table(pyarrow.Table.from_pylist([{"a": 1, "b": 2}]), tmp_path / "other.parquet")
    with pytest.raises(DataError, match='"a", "b"'):
        read_questions(tmp_path / "other.parquet", None)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"question": "a", "choices": ["b"], "answer": 0}, "2 to 1,000"),
        ({"question": "a", "choices": "bc", "answer": 0}, "2 to 1,000"),
        ({"question": "a", "choices": ["b", 3], "answer": 0}, "strings"),
        ({"question": "a", "choices": ["b", "c"], "answer": 2}, "0 to 1"),
        ({"question": "a", "choices": ["b", "c"], "answer": True}, "0 to 1"),
        ({"question": "a", "choices": ["b", "c"], "answer": "d"}, "0 to 1"),
        ({"question": "a", "choices": ["b", "c"], "answer": "1" * 5000}, "0 to 1"),
        ({"question": 7, "choices": ["b", "c"], "answer": 0}, '"question"'),
        ({"question": "a", "choices": {"text": ["b", "c"], "label": ["A"]}, "answerKey": "A"}, "2 to 1,000"),
        (
            {"question": "a", "choices": {"text": ["b", "c"], "label": ["A", "B"]}, "answerKey": "C"},
            "answerKey",
        ),
        ({"question": "a", "choices": ["b", "c"], "answerKey": "C"}, "object"),
        ({"sentence": "a b", "option1": "c", "option2": "d", "answer": "1"}, "gap"),
        ({"sentence": "a _", "option1": "c", "option2": "d", "answer": ""}, "1 to 2"),
        ({"activity_label": "a", "ctx": "b", "endings": ["c", "d"], "label": ""}, "0 to 1"),
        ({"text": "a"}, "no known keys"),
    ],
)
def test_malformed_questions(row: Row, problem: str) -> None:
    with pytest.raises(DataError, match="it:1") as error:
        parse_question(json.dumps(row).encode(), "it:1")
    assert problem in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 500


def test_files_that_are_refused(place: Path, tmp_path: Path) -> None:
    model = place / "run" / "model.gguf"
    refused(run("evaluate", model, "--choices", tmp_path / "none.jsonl"), 2, "none.jsonl")
    refused(run("evaluate", model, "--choices", place / "text.txt"), 1, "text.txt")
    (tmp_path / "broken.jsonl").write_text('{"question": "a", \n')
    refused(run("evaluate", model, "--choices", tmp_path / "broken.jsonl"), 1, "broken.jsonl, line 1")
    mixed = [
        json.loads((place / f"{kind}.jsonl").read_text().splitlines()[0]) for kind in ("arc", "hellaswag")
    ]
    refused(run("evaluate", model, "--choices", write(tmp_path / "mixed.jsonl", mixed)), 1, "another form")
    (tmp_path / "empty.jsonl").write_text("\n")
    refused(run("evaluate", model, "--choices", tmp_path / "empty.jsonl"), 1, "empty.jsonl")
    refused(run("evaluate", model, "--limit", 3, place / "text.txt"), 2, "--limit")
    refused(run("evaluate", model), 2, "--choices")


def test_comparison_limit_and_api(place: Path, tmp_path: Path) -> None:
    model, data = place / "run" / "model.gguf", place / "arc.jsonl"
    ran(
        *("finetune", model, place / "text.txt", "--lora-r", 2, "--iters", 8, "--lr", 0.05, "--batch", 2),
        *("--ctx", 32, "--eval-every", 0, "--out", tmp_path / "lora"),
    )
    adapter = tmp_path / "lora" / "adapter.gguf"
    more = ("--choices", data, "--choices", place / "winogrande.jsonl", "--limit", 5, "--batch", 2)
    found = json.loads(ran("evaluate", model, *more, "--lora", adapter, "--compare", "base", "--json").out)
    assert "loss" not in found and [one["questions"] for one in found["choices"]] == [5, 5]
    assert found["base"]["choices"] == scored(place, *more)
    assert found["choices"] == scored(place, *more, "--lora", adapter)
    table = ran("evaluate", model, place / "text.txt", *more, "--lora", adapter, "--compare", "base").out
    assert [line.split("  ")[0] for line in table.splitlines()[-3:]] == [
        *("arc.jsonl: acc", "arc.jsonl: acc norm", "winogrande.jsonl: acc")
    ]
    result = evaluate(model, choices=[data, place / "winogrande.jsonl"], limit=5, batch=2)
    assert result.loss is None and [vars(one) for one in result.choices] == found["base"]["choices"]
