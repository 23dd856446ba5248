"""`llamatrain preview`, and the options that are made from dataclass fields."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

from llamatrain.cli.main import app
from llamatrain.config.options import build, options_of
from llamatrain.data import cache
from llamatrain.data.corpus import open_corpus
from llamatrain.data.options import DataOptions
from llamatrain.data.rows import Rows
from llamatrain.data.tokenizer import load
from llamatrain.errors import DataError, LlamatrainError
from llamatrain.files.reader import open_gguf
from llamatrain.files.values import boolean
from tests.tiny_gguf import llama_metadata, llama_tensors, write_arrays

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command in a folder with a model, a text and a chat."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLAMATRAIN_CACHE", str(tmp_path / "cache"))
    cache.cache_folder.cache_clear()
    write_arrays(Path("m.gguf"), llama_metadata() | {"tokenizer.ggml.add_space_prefix": boolean(False)}, llama_tensors())
    Path("a.txt").write_text("abcdefghij" * 10)
    rows = [{"prompt": f"{number}?", "completion": "é" * number} for number in range(1, 9)]
    Path("a.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"prompt": "x" * 99, "completion": "y"}])))

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["preview", "--model", "m.gguf", *arguments], catch_exceptions=True)

    return run


def parsed(result: Result) -> list[dict[str, list[float]]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_json_rows_are_those_of_training(run: Run) -> None:
    shown = parsed(run("a.jsonl", "--json", "-n", "21", "--seed", "3", "--ctx", "48", "--batch", "2"))
    tokenizer = load(open_gguf("m.gguf").metadata)
    corpus, _ = open_corpus(["a.jsonl"], tokenizer, DataOptions(), 48, 3)
    rows = Rows(corpus, DataOptions(), 3, tokenizer.eos, tokenizer.bos)
    for number, row in enumerate(shown):
        if number % 2 == 0:
            batch = rows.batch(2)
        for name in ("tokens", "targets", "weights", "positions", "starts"):
            assert np.array_equal(row[name], getattr(batch, name)[number % 2])
    assert len(shown) == 21 and rows.state.epoch == 2


def test_json_of_text(run: Run) -> None:
    rows = parsed(run("a.txt", "--json", "-n", "2", "--no-shuffle", "--ctx", "10"))
    letters = [ord(letter) + 3 for letter in "abcdefghij"]
    assert rows[0] == {
        "tokens": [1, *letters[:9]],
        "targets": letters,
        "weights": [1] * 10,
        "positions": list(range(10)),
        "starts": [0] * 10,
    }


def test_rows_for_people(run: Run) -> None:
    result = run("a.jsonl", "--no-shuffle", "-n", "2", "--ctx", "48")
    assert result.exit_code == 0
    assert "2?[[éé</s>]]" in result.stdout.replace("<s>", "")
    assert "row 2: 7 of 32 tokens, 5 trained" in result.stdout
    assert "8 samples" in result.stdout and "1 skipped: no token to train on in a row (a.jsonl:9)" in result.stdout


def test_the_context_is_the_model_s(run: Run) -> None:
    assert len(parsed(run("a.txt", "--json", "-n", "1"))[0]["tokens"]) == 64


def test_errors_name_what_is_wrong(run: Run) -> None:
    Path("bad.jsonl").write_text('{"text": "a"}\n{"body": 1}\n')
    assert "bad.jsonl, line 2: no known keys" in str(run("bad.jsonl").exception)
    assert isinstance(run("nowhere").exception, DataError)
    for wrong in (("a.txt", "-n", "0"), ("a.txt", "--ctx", "0"), ("a.txt", "--pack", "--fill-with-next-samples")):
        error = run(*wrong).exception
        assert isinstance(error, LlamatrainError) and error.exit_code == 2
    assert run("--ctx", "8").exit_code == 2


# ---- options from fields ---------------------------------------------------


@dataclass
class Some:
    count: Annotated[int, "How many."]
    rate: Annotated[float, "How fast."] = 0.5
    kind: Annotated[Literal["a", "b"], "Which."] = "a"
    sure: Annotated[bool, "Whether."] = True
    most: Annotated[int | None, "At most."] = None
    files: Annotated[tuple[Path, ...], "Some."] = ()
    scaled: Annotated[tuple[tuple[Path, float], ...], "Some with a scale."] = ()


@click.command()
@options_of(Some)
def command(**values: Any) -> None:
    click.echo(repr(build(Some, values | {"of another": 1})))


def test_options_are_made_from_fields() -> None:
    assert CliRunner().invoke(command, ["--count", "1"]).stdout.strip() == repr(Some(1))
    given = ["--count=2", "--rate=1e-5", "--kind=b", "--no-sure", "--most=3", "--files=x", "--files=y", "--scaled", "p", "0.5"]
    given += ["--scaled", "q", "2"]
    expected = Some(2, 1e-5, "b", False, 3, (Path("x"), Path("y")), ((Path("p"), 0.5), (Path("q"), 2.0)))
    assert CliRunner().invoke(command, given).stdout.strip() == repr(expected)
    for wrong in ([], ["--count", "x"], ["--count", "1", "--kind", "c"]):
        assert CliRunner().invoke(command, wrong).exit_code == 2
    assert "How fast.  [default: 0.5]" in CliRunner().invoke(command, ["--help"]).stdout
