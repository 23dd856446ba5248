"""`generate --best-of`: the answer with the highest reward, as rows that finetune reads."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.architecture_models import shape_of, weights, written
from tests.helpers.cli import Argument, Done, ran, run

SAMPLED: tuple[Argument, ...] = ("-n", 8, "--seed", 5, "--temp", 1.5)
REWARD = "def reward(prompt, answer, row):\n    return len(set(answer)) + (row.get('bonus') or 0)\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place, shape = tmp_path_factory.mktemp("best"), shape_of("llama", "a")
    written(place / "m.gguf", shape, weights(shape))
    (place / "reward.py").write_text(REWARD)
    (place / "negative.py").write_text(REWARD.replace("return ", "return -"))
    (place / "broken.py").write_text("def reward(prompt, answer, row):\n    return 1 / 0\n")
    return place


def rows(path: Path, *given: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return path


def best(place: Path, prompts: Path, count: int, *options: Argument, reward: str = "reward.py") -> list[Any]:
    words = ("--prompts", prompts, "--best-of", count, "--reward", place / reward, *SAMPLED, *options)
    done = ran("generate", place / "m.gguf", "--ctx", 200, *words)
    return [json.loads(line) for line in done.out.splitlines()]


def samples(place: Path, prompt: str, count: int) -> list[str]:
    """The answers of the seeds that follow each other."""
    found = []
    for number in range(count):
        options = ("-n", 8, "--seed", 5 + number, "--temp", 1.5, "--ctx", 200)
        found.append(ran("generate", place / "m.gguf", "--prompt", prompt, *options).out)
    return found


def test_the_answer_with_the_highest_reward(place: Path, tmp_path: Path) -> None:
    data = rows(tmp_path / "p.jsonl", {"prompt": "to be", "bonus": 2}, {"question": "or not", "answer": "x"})
    first, second = best(place, data, 4)
    for found, prompt, bonus in ((first, "to be", 2), (second, "or not\n", 0)):
        answers = samples(place, prompt, 4)
        scores = [len({*answer}) + bonus for answer in answers]
        assert found["reward"] == max(scores)
        assert found["answer"] == answers[scores.index(max(scores))]
    assert {*first} == {"prompt", "bonus", "answer", "reward"}
    assert {*second} == {"question", "answer", "reward"}
    lowest = best(place, data, 4, reward="negative.py")[1]
    assert -lowest["reward"] == min(len({*answer}) for answer in samples(place, "or not\n", 4))


def test_chats_lines_and_mapped_columns(place: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "No."}]
    (chat,) = best(place, rows(tmp_path / "c.jsonl", {"messages": turns}), 2)
    assert {*chat} == {"messages", "reward"} and chat["messages"][0] == turns[0]
    assert [one["role"] for one in chat["messages"]] == ["user", "assistant"]
    (tmp_path / "l.txt").write_text("a?\n")
    (line,) = best(place, tmp_path / "l.txt", 2, "--each-line")
    (mapped,) = best(place, rows(tmp_path / "m.jsonl", {"asked": "a?"}), 2, "--columns", "prompt=asked")
    assert line == mapped == {"prompt": "a?", "answer": line["answer"], "reward": line["reward"]}


def test_finetune_reads_the_rows(place: Path, tmp_path: Path) -> None:
    prompts = rows(tmp_path / "p.jsonl", {"prompt": "to be"}, {"question": "or not"})
    data = rows(tmp_path / "best.jsonl", *best(place, prompts, 2))
    shown = ran("preview", data, "--model", place / "m.gguf").out
    assert "to\u2581be" in shown and "or\u2581not" in shown and "2 samples" in shown


def refused(done: Done, code: int, *words: str) -> None:
    assert done.code == code and not done.out, done
    (line,) = done.errors
    for word in words:
        assert word in line, line


def test_what_is_refused(place: Path, tmp_path: Path) -> None:
    data = rows(tmp_path / "p.jsonl", {"prompt": "to be"})
    asked = ("generate", place / "m.gguf", "--prompts", data)
    scored = ("--reward", place / "reward.py")
    refused(run(*asked, "--best-of", 2), 2, "--reward")
    refused(run(*asked, *scored), 2, "without --best-of")
    refused(run(*asked, "--best-of", 0, *scored), 2, "--best-of")
    refused(run(*asked, "--best-of", 2, "--temp", 0, *scored), 2, "--temp 0")
    refused(run(*asked, "--best-of", 2, "--reward", tmp_path / "none.py"), 2, "none.py")
    refused(run("generate", place / "m.gguf", "--prompt", "a", "--best-of", 2, *scored), 2, "--prompts")
    broken = ("--best-of", 2, "--reward", place / "broken.py", "-n", 2)
    refused(run(*asked, *broken), 1, "broken.py", "line 1")
    done = run(*asked, *broken, "--reward-failed", -1)
    assert done.code == 0 and json.loads(done.out)["reward"] == -1
