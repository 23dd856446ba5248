"""`evaluate --exact-match`: generated answers against expected ones."""

import json
import math
import re
import string
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain import LlamatrainError, evaluate
from llamatrain.commands import answer_pattern
from llamatrain.commands.answer_pattern import extract_answers
from llamatrain.commands.exact_match import ExactMatchOptions
from llamatrain.errors import UsageError
from tests.helpers.chat_templates import CHATML
from tests.helpers.cli import TINY, Argument, ran, run
from tests.run.test_from_scratch_errors import refused

CTX, COUNT, TOKENS = 48, 8, 12
Row = dict[str, Any]


def write(path: Path, rows: Sequence[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that learned some answers by heart, and prompts to half of which it has other answers."""
    place = tmp_path_factory.mktemp("match")
    rows = [
        {"prompt": f"{letter}?", "answer": f"Is {letter.upper()}. So {n}"}
        for n, letter in enumerate("abcdefgh")
    ]
    data = write(place / "learned.jsonl", rows)
    ran(
        *("from-scratch", data, *TINY, "--ctx", CTX, "--batch", 8, "--iters", 150, "--lr", 1e-2),
        *("--eval-every", 0, "--out", place / "run"),
    )
    asked = [row | {"answer": f" is {row['prompt'][0]}, so {n % 4}\n"} for n, row in enumerate(rows)]
    write(place / "asked.jsonl", asked)
    return place


def matched(place: Path, *arguments: Argument) -> dict[str, Any]:
    options = ("--exact-match", place / "asked.jsonl", "--answer-tokens", TOKENS, *arguments, "--json")
    (found,) = json.loads(ran("evaluate", place / "run" / "model.gguf", *options).out)["exact_match"]
    return found


def generated(place: Path) -> list[tuple[str, str]]:
    """The expected answers, and those of `generate`."""
    pairs = []
    for line in (place / "asked.jsonl").read_text().splitlines():
        row = json.loads(line)
        done = ran(
            "generate", place / "run" / "model.gguf", "--prompt", row["prompt"], "--temp", 0, "-n", TOKENS
        )
        pairs.append((row["answer"], done.out))
    return pairs


def share(pairs: list[tuple[str, str]], case: bool, punctuation: bool, pattern: str = "") -> list[bool]:
    """The comparison of lm-evaluation-harness: exact_match with its filters."""

    def prepared(text: str) -> str:
        match = re.findall(pattern, text)[:1] if pattern else []
        text = match[0] if match else text
        text = text.lower() if case else text
        table = str.maketrans("", "", string.punctuation)
        return (text.translate(table) if punctuation else text).strip()

    return [prepared(answer) == prepared(text) for answer, text in pairs]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), {"case": False, "punctuation": False}),
        (("--ignore-case",), {"case": True, "punctuation": False}),
        (("--ignore-case", "--ignore-punctuation"), {"case": True, "punctuation": True}),
        (("--answer-pattern", "[0-9]+"), {"case": False, "punctuation": False, "pattern": "[0-9]+"}),
        (
            ("--answer-pattern", r"(?i)is (\w)", "--ignore-case"),
            {"case": True, "punctuation": False, "pattern": r"(?i)is (\w)"},
        ),
    ],
)
def test_share_of_answers(options: tuple[str, ...], expected: dict[str, Any], place: Path) -> None:
    right, found = share(generated(place), **expected), matched(place, *options)
    assert found["questions"] == COUNT and found["exact_match"] == pytest.approx(np.mean(right))
    error = np.std(right, ddof=1) / math.sqrt(COUNT)
    assert found["exact_match_error"] == pytest.approx(error)


def test_options_make_a_difference(place: Path) -> None:
    """The model knows its answers, so that these options decide."""
    shares = [
        matched(place, *options)["exact_match"]
        for options in (
            (),
            ("--ignore-case", "--ignore-punctuation"),
            ("--answer-pattern", r"(?i)is (\w)", "--ignore-case"),
        )
    ]
    assert shares[0] == 0 and 0 < shares[1] <= 0.5 < shares[2], shares


def test_answers_are_written(place: Path, tmp_path: Path) -> None:
    model, out = place / "run" / "model.gguf", tmp_path / "answers.jsonl"
    more = ("--exact-match", place / "asked.jsonl", "--answer-tokens", TOKENS, "--answer-pattern", "[0-9]+")
    for _ in range(2):  # an older one is replaced
        table = ran("evaluate", model, *more, "--limit", 3, "--answers-out", out).out
    assert table.startswith("asked.jsonl: exact match  ")
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["generated"] for line in lines] == [text for _, text in generated(place)[:3]]
    assert [line["found"] for line in lines] == [re.findall("[0-9]+", line["generated"])[0] for line in lines]
    assert {*lines[0]} == {"file", "of", "prompt", "expected", "generated", "found", "matches"}
    result = evaluate(model, exact_match=place / "asked.jsonl", answer_tokens=TOKENS, answer_pattern="[0-9]+")
    (score,) = result.exact_match
    assert [vars(answer) for answer in score.answers][:3] == [
        {name: value for name, value in line.items() if name not in ("file", "of")} for line in lines
    ]
    (tmp_path / "mine.txt").write_text("keep me")
    refused(run("evaluate", model, *more, "--answers-out", tmp_path / "mine.txt"), 1, "mine.txt")
    refused(run("evaluate", model, place / "learned.jsonl", "--answers-out", out), 2, "--exact-match")
    assert (tmp_path / "mine.txt").read_text() == "keep me"


def test_chats_through_a_template(place: Path, tmp_path: Path) -> None:
    """The last answer of a chat is expected, and prompts become chats as well."""
    (tmp_path / "template.jinja").write_text(CHATML)
    turns = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "Is A."}]
    chat = {
        "messages": [*turns, {"role": "user", "content": "b?"}, {"role": "assistant", "content": "Is B."}]
    }
    data = write(tmp_path / "chats.jsonl", [chat, {"prompt": "c?", "answer": "Is C."}])
    model = place / "run" / "model.gguf"
    more = ("--exact-match", data, "--answer-tokens", 3, "--chat-template", tmp_path / "template.jinja")
    ran("evaluate", model, *more, "--ctx", 256, "--answers-out", tmp_path / "out.jsonl")
    first, second = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert first["expected"] == "Is B." and second["expected"] == "Is C."
    assert "Is A." in first["prompt"] and "Is B." not in first["prompt"]
    assert second["prompt"] == "<|im_start|>user\nc?<|im_end|>\n<|im_start|>assistant\n"
    refused(run("evaluate", model, *more, "--ctx", 16), 1, "tokens", "--ctx")


def test_comparison(place: Path, tmp_path: Path) -> None:
    model, data = place / "run" / "model.gguf", place / "asked.jsonl"
    ran(
        *("finetune", model, data, "--lora-r", 4, "--iters", 80, "--lr", 2e-2, "--batch", 8, "--ctx", CTX),
        *("--eval-every", 0, "--precision", "f32", "--out", tmp_path / "lora"),
    )
    more = ("--exact-match", data, "--answer-tokens", TOKENS, "--lora", tmp_path / "lora" / "adapter.gguf")
    found = json.loads(ran("evaluate", model, *more, "--compare", "base", "--json").out)
    before, after = found["base"]["exact_match"][0], found["exact_match"][0]
    assert before == matched(place) and before["exact_match"] == 0 < after["exact_match"]
    table = ran("evaluate", model, *more, "--compare", "base").out.splitlines()
    assert table[0].split() == ["base", "model", "change"] and table[1].endswith(
        f"{100 * after['exact_match']:+.2f}"
    )


# ---- patterns --------------------------------------------------------------------------


def test_first_match_or_group() -> None:
    assert extract_answers(r"[0-9]+", ["a 12 b 3", "none", ""]) == ["12", None, None]
    assert extract_answers(r"(x)|y(z)", ["yz x", "x"]) == ["z", "x"]
    assert extract_answers(r"a(b?)", ["a"]) == [""]


def test_slow_patterns_are_stopped(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    monkeypatch.setattr(answer_pattern, "SECONDS", 1.5)
    before = time.monotonic()
    with pytest.raises(UsageError, match="takes more than") as error:
        extract_answers(r"(a+)+$", ["a" * 5000 + "b"])
    assert time.monotonic() - before < 8 and "\n" not in str(error.value)


def test_invalid_patterns(place: Path) -> None:
    for pattern in ("(", "[", "a{2,1}", "(?P<a>x)(?P<a>y)", "(" * 100_000, "a{99999999999999}"):
        with pytest.raises(UsageError, match="--answer-pattern") as error:
            extract_answers(pattern, [])
        assert len(str(error.value)) < 500 and "\n" not in str(error.value)
    model = place / "run" / "model.gguf"
    refused(
        run("evaluate", model, "--exact-match", place / "asked.jsonl", "--answer-pattern", "("), 2, "pattern"
    )


# ---- what is refused -------------------------------------------------------------------


def test_rows_without_answers(place: Path, tmp_path: Path) -> None:
    model = place / "run" / "model.gguf"
    rows = {
        "text": {"text": "abc"},
        "unanswered": {"messages": [{"role": "user", "content": "a"}]},
        "first": {"messages": [{"role": "assistant", "content": "a"}]},
        "number": {"prompt": "a", "answer": 7},
        "unknown": {"a": "b"},
    }
    for name, row in rows.items():
        done = run("evaluate", model, "--exact-match", write(tmp_path / f"{name}.jsonl", [row]))
        refused(done, 1, f"{name}.jsonl")
    refused(run("evaluate", model, "--exact-match", tmp_path / "none.jsonl"), 2, "none.jsonl")
    (tmp_path / "plain.txt").write_text("some text")
    refused(run("evaluate", model, "--exact-match", tmp_path / "plain.txt"), 1, "plain.txt")
    (tmp_path / "empty.jsonl").write_text("")
    refused(run("evaluate", model, "--exact-match", tmp_path / "empty.jsonl"), 1, "empty.jsonl")


def test_options_without_files(place: Path) -> None:
    model, data = place / "run" / "model.gguf", place / "learned.jsonl"
    for option in (
        ("--ignore-case",),
        ("--answer-stop", "x"),
        ("--answer-tokens", 3),
        ("--answer-pattern", "a"),
    ):
        refused(run("evaluate", model, data, *option), 2, option[0], "--exact-match")
    with pytest.raises(LlamatrainError, match="ignore_case has no effect without exact_match"):
        evaluate(model, data, ignore_case=True)


def test_normalization() -> None:
    assert ExactMatchOptions(exact_match=("a",)).normalize(" A, b! ") == "A, b!"
    options = ExactMatchOptions(exact_match=("a",), ignore_case=True, ignore_punctuation=True)
    assert options.normalize(" A, b! ") == "a b"
