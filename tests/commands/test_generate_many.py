"""`generate --prompts`, and the same from Python: each prompt has the text that it has alone."""

import json
from pathlib import Path
from typing import Any

import pytest

import llamatrain
from llamatrain import LlamatrainError
from llamatrain.adapters.options import AdapterOptions
from llamatrain.commands import generate_many as many
from llamatrain.commands.generate import LoadOptions, TextModel
from tests.helpers.architecture_models import shape_of, weights, written
from tests.helpers.cli import Argument, Done, ran, run
from tests.helpers.mpi_programs import command as command_on_ranks
from tests.helpers.mpi_programs import needs_mpi
from tests.helpers.small_models import small
from tests.helpers.small_models import weights as small_weights
from tests.helpers.small_models import written as small_written

TEXTS = ["to be", "or not", "to be", "that is the question, " * 5, "x"]
CTX: tuple[Argument, ...] = ("--ctx", 200)
GREEDY: tuple[Argument, ...] = (*CTX, "--temp", 0, "-n", 6)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place, h = tmp_path_factory.mktemp("many"), small(vocab=8, ctx=16, layers=1)
    shape = shape_of("llama", "a")
    written(place / "m.gguf", shape, weights(shape))
    small_written(place / "numbers.gguf", h, small_weights(h))
    (place / "lines.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    return place


def lines_of(place: Path, *options: Argument) -> list[dict[str, Any]]:
    done = ran("generate", place / "m.gguf", "--prompts", *options)
    return [json.loads(line) for line in done.out.splitlines()]


def alone(place: Path, prompt: str, *options: Argument) -> str:
    return ran("generate", place / "m.gguf", "--prompt", prompt, *options).out


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_each_line(place: Path) -> None:
    done = ran("generate", place / "m.gguf", "--prompts", place / "lines.txt", "--each-line", *GREEDY)
    found = [json.loads(line) for line in done.out.splitlines()]
    assert "made for 64 tokens" in done.err
    assert [line["text"] for line in found] == [alone(place, text, *GREEDY) for text in TEXTS]
    assert [line["prompt"] for line in found] == TEXTS
    assert [line["index"] for line in found] == [*range(len(TEXTS))]
    assert {line["stop_reason"] for line in found} == {"n"}


@pytest.mark.parametrize("parallel", [1, 2, 7])
def test_sampling_as_of_one_prompt(parallel: int, place: Path) -> None:
    options = (*CTX, "-n", 8, "--seed", 3, "--temp", 1.5, "--repeat-penalty", 1.2)
    found = lines_of(place, place / "lines.txt", "--each-line", "--parallel", parallel, *options)
    assert [line["text"] for line in found] == [alone(place, text, *options) for text in TEXTS]


def test_without_a_seed_equal_prompts_have_different_texts(place: Path) -> None:
    found = lines_of(place, place / "lines.txt", "--each-line", *CTX, "-n", 12, "--temp", 2, "--top-k", 0)
    assert found[0]["prompt"] == found[2]["prompt"] and found[0]["text"] != found[2]["text"]


def test_rows_and_chats(place: Path, tmp_path: Path) -> None:
    """They are rendered as in training, here without a chat template; an answer in a row is not read."""
    turns = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "No."}]
    data = jsonl(
        tmp_path / "p.jsonl",
        {"prompt": "a?", "answer": "No."},
        {"question": "a?"},
        {"messages": turns},
        {"messages": turns[:1]},
        {"messages": [*turns, {"role": "user", "content": "b?"}]},
    )
    found = lines_of(place, data, *GREEDY)
    asked = "<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\n"
    assert [line["prompt"] for line in found[:4]] == ["a?", "a?\n", asked, asked]
    assert found[4]["prompt"].startswith(asked + "No.") and "b?" in found[4]["prompt"]
    assert [line["text"] for line in found] == [alone(place, line["prompt"], *GREEDY) for line in found]
    mapped = jsonl(tmp_path / "q.jsonl", {"asked": "a?"})
    assert lines_of(place, mapped, "--columns", "prompt=asked", *GREEDY)[0]["text"] == found[0]["text"]


def test_stop_texts(place: Path) -> None:
    whole = lines_of(place, place / "lines.txt", "--each-line", *CTX, "-n", 12, "--temp", 0)
    stop = next(char for char in whole[1]["text"][3:] if char.isprintable())
    options = (*CTX, "-n", 12, "--temp", 0, "--stop", stop)
    found = lines_of(place, place / "lines.txt", "--each-line", *options)
    for line, longer in zip(found, whole, strict=True):
        assert line["text"] == longer["text"].partition(stop)[0] == alone(place, line["prompt"], *options)
        assert line["stop_reason"] == ("stop" if stop in longer["text"] else "n")


def test_a_full_context(place: Path) -> None:
    found = lines_of(place, place / "lines.txt", "--each-line", "--temp", 0, "--ctx", 160)
    assert {line["stop_reason"] for line in found} <= {"ctx", "end"} and found[3]["stop_reason"] == "ctx"
    assert [line["text"] for line in found] == [
        alone(place, text, "--temp", 0, "--ctx", 160) for text in TEXTS
    ]


def test_token_numbers(place: Path, tmp_path: Path) -> None:
    (tmp_path / "numbers.txt").write_text("0 3 5\n1\r\n\n7 7\n")
    done = ran(
        "generate", place / "numbers.gguf", "--prompts", tmp_path / "numbers.txt", "--each-line", *GREEDY
    )
    found = [json.loads(line) for line in done.out.splitlines()]
    assert [line["prompt"] for line in found] == ["0 3 5", "1", "7 7"]
    for line in found:
        one = ran("generate", place / "numbers.gguf", "--prompt", line["prompt"], *GREEDY)
        assert one.out == line["text"]


# ---- what is refused -----------------------------------------------------------


def refused(done: Done, code: int, *words: str) -> None:
    assert done.code == code and not done.out, done
    (line,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    for word in words:
        assert word in line, line


@pytest.mark.parametrize(
    ("content", "options", "code", "words"),
    [
        ("", ["--each-line"], 1, ["no prompts"]),
        ("\n \n\r\n", ["--each-line"], 1, ["no prompts"]),
        ("", [], 1, ["empty"]),
        ("text\n", [], 1, ["--each-line"]),
        ('{"prompt": "a"}\n{"prompt"', [], 1, ["line 2", "not JSON"]),
        ('{"prompt": "a"}\n[1]\n', [], 1, ["line 2", "a list"]),
        ('{"prompt": 5}\n', [], 1, ["line 1", "a number"]),
        ('{"prompt": null}\n', [], 1, ["line 1", "no prompt"]),
        ('{"text": "a"}\n', [], 1, ["line 1", "no prompt"]),
        ('{"messages": []}\n', [], 1, ["line 1"]),
        ('{"messages": [{"role": "assistant", "content": "a"}]}\n', [], 1, ["line 1", "no message"]),
        ('{"messages": "hello"}\n', [], 1, ["line 1"]),
        ('{"prompt": "\\ud800"}\n', [], 1, ["line 1", "UTF-8"]),
        ('{"prompt": "a"}\n', ["--columns", "prompt=b"], 1, ["line 1", '"b"']),
        ('{"prompt": "a"}\n', ["--columns", "prompt=b", "--each-line"], 2, ["--each-line"]),
        ("a\n" + "b" * 300 + "\n", ["--each-line", "--ctx", "64"], 2, [":2: the prompt", "64"]),
        ('{"prompt": "%s"}\n' % ("b" * 300), ["--ctx", "64"], 1, ["line 1", "64"]),
        ("a\n", ["--each-line", "--chat"], 2, ["--chat", "--prompts"]),
        ("a\n", ["--each-line", "--verbose"], 2, ["--verbose"]),
        ("a\n", ["--each-line", "--prompt", "b"], 2, ["--prompt"]),
        ("a\n", ["--each-line", "--ctx-shift"], 2, ["shifted"]),
        ("a\n", ["--each-line", "--parallel", "0"], 2, ["--parallel"]),
        ("a\n", ["--each-line", "--parallel", "2000000000"], 1, ["--parallel", "memory"]),
    ],
)
def test_damaged_input(
    content: str, options: list[str], code: int, words: list[str], place: Path, tmp_path: Path
) -> None:
    file = tmp_path / ("p.txt" if "--each-line" in options or content == "text\n" else "p.jsonl")
    file.write_text(content)
    refused(run("generate", place / "m.gguf", "--prompts", file, *options), code, *words)


def test_bytes_that_are_no_text(place: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    refused(run("generate", place / "m.gguf", "--prompts", tmp_path / "p.jsonl"), 1, "line 1", "UTF-8")
    (tmp_path / "p.txt").write_bytes(b"\xff\xfe\n")
    options = ("--each-line", *GREEDY)
    (found,) = lines_of(place, tmp_path / "p.txt", *options)
    assert found["prompt"] == "\ufffd\ufffd"


def test_missing_files_and_options_without_effect(place: Path) -> None:
    refused(run("generate", place / "m.gguf", "--prompts", place / "none.jsonl"), 2, "none.jsonl")
    refused(run("generate", place / "m.gguf", "--prompts", place, "--each-line"), 1, "folder")
    refused(run("generate", place / "m.gguf", "--prompt", "a", "--each-line"), 2, "without --prompts")
    refused(run("generate", place / "m.gguf", "--prompt", "a", "--parallel", 2), 2, "without --prompts")
    rows = jsonl(place / "rows.jsonl", {"prompt": "a"})
    refused(run("generate", place / "numbers.gguf", "--prompts", rows), 2, "no text vocabulary")


# ---- how many at a time ----------------------------------------------------------


def test_how_many_are_generated_at_a_time(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TextModel(place / "m.gguf", LoadOptions(), AdapterOptions())
    assert [many.choose_slots(model, count) for count in (1, 4, 5, 16, 1000)] == [4, 4, 8, 16, 16]
    monkeypatch.setattr(many, "has_room", lambda model, slots: slots <= 8)
    assert [many.choose_slots(model, count) for count in (1, 5, 1000)] == [4, 8, 8]
    monkeypatch.setattr(many, "has_room", lambda model, slots: False)
    assert many.choose_slots(model, 1000) == 1
    shape = shape_of("mixtral", "a")
    written(place / "experts.gguf", shape, weights(shape))
    experts = TextModel(place / "experts.gguf", LoadOptions(), AdapterOptions())
    monkeypatch.undo()
    assert [many.choose_slots(experts, count) for count in (1, 1000)] == [16, 16]


# ---- several processes -----------------------------------------------------------


@needs_mpi
@pytest.mark.parametrize("ranks", [2, 7])
def test_processes_share_the_prompts(ranks: int, place: Path) -> None:
    """With more processes than prompts, too; the first prints all texts."""
    words = ("generate", place / "m.gguf", "--prompts", place / "lines.txt", "--each-line", *CTX)
    options = ("-n", 8, "--seed", 3, "--threads", 1)
    done = command_on_ranks(ranks, *words, *options, seconds=200)
    assert done.code == 0, done.err
    assert done.out == ran(*words, *options).out


@needs_mpi
def test_one_prompt_needs_one_process(place: Path) -> None:
    done = command_on_ranks(2, "generate", place / "m.gguf", "--prompt", "a", seconds=100)
    assert done.code == 2 and not done.out and "single process" in done.err


# ---- Python ---------------------------------------------------------------------


def test_python(place: Path) -> None:
    model = llamatrain.load(place / "m.gguf", ctx=200)
    found = model.generate_many([*TEXTS[:2], b"or not", {"prompt": "a?"}], n=6, temp=0)
    assert [one.text for one in found[:3]] == [alone(place, text, *GREEDY) for text in (*TEXTS[:2], TEXTS[1])]
    assert found[3].text == alone(place, "a?", *GREEDY) and found[3].stop_reason == "n"
    assert model.generate_many([]) == []


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ("text", {}, "list of texts"),
        ([5], {}, "prompt 1"),
        (["a", {"prompt": {1, 2}}], {}, "prompt 2"),
        ([{"foo": 1}], {}, "prompt 1"),
        (["a"], {"parallel": 0}, "parallel"),
        (["a"], {"parallel": True}, "parallel"),
        (["a"], {"ctx_shift": True}, "shifted"),
    ],
)
def test_python_refuses(prompts: Any, options: dict[str, Any], words: str, place: Path) -> None:
    with pytest.raises(LlamatrainError, match=words):
        llamatrain.load(place / "m.gguf").generate_many(prompts, **options)
