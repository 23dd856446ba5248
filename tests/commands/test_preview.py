"""`llamatrain preview`, and the options that are made from dataclass fields."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

import llamatrain
from llamatrain.cli.main import app
from llamatrain.cli.typer_app import Command, make_app, with_options
from llamatrain.commands.preview import PreviewOptions, first_rows
from llamatrain.config.options import Option, Options, build
from llamatrain.data import token_cache
from llamatrain.data.batches import Batches
from llamatrain.data.dataset import open_dataset
from llamatrain.data.options import DataOptions
from llamatrain.data.tokenizer import load
from llamatrain.errors import DataError, FileError, LlamatrainError, UsageError
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.values import Kind, Value, boolean, numbers, string, strings, u32
from tests.helpers.errors import raises
from tests.helpers.tiny_gguf import llama_metadata, llama_tensors, write_arrays

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command in a folder with a model, a text and a chat."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLAMATRAIN_CACHE", str(tmp_path / "cache"))
    token_cache.cache_folder.cache_clear()
    write_arrays(
        Path("m.gguf"),
        llama_metadata() | {"tokenizer.ggml.add_space_prefix": boolean(False)},
        llama_tensors(),
    )
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
    shown = parsed(
        run("a.jsonl", "--json", "-n", "21", "--seed", "3", "--ctx", "48", "--batch", "2", "--no-pack")
    )
    tokenizer = load(open_gguf("m.gguf").metadata)
    corpus, _ = open_dataset(["a.jsonl"], tokenizer, DataOptions(), 48, 3)
    rows = Batches(corpus, DataOptions(pack=False), 3, tokenizer.eos, tokenizer.bos)
    for number, row in enumerate(shown):
        if number % 2 == 0:
            batch = rows.batch(2)
        for name in ("tokens", "targets", "weights", "positions", "starts"):
            assert np.array_equal(row[name], getattr(batch, name)[number % 2])
    assert len(shown) == 21 and rows.state.epoch == 2


@pytest.mark.parametrize("how", ["--no-pack", "--pack"])
def test_no_sample_is_shown_twice(run: Run, how: str) -> None:
    Path("two.jsonl").write_text(
        "".join(json.dumps({"prompt": each, "completion": "!"}) + "\n" for each in ("one?", "two?"))
    )
    shown = run("two.jsonl", "-n", "10", "--ctx", "16", how).stdout
    assert shown.count("one?") == shown.count("two?") == 1
    assert len(parsed(run("two.jsonl", "-n", "10", "--json", "--ctx", "16", "--no-pack"))) == 10


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
    result = run("a.jsonl", "--no-shuffle", "-n", "2", "--ctx", "48", "--no-pack")
    assert result.exit_code == 0
    assert "2?[[éé</s>]]" in result.stdout.replace("<s>", "")
    assert "row 2: 7 of 32 tokens, 5 trained" in result.stdout
    assert (
        "8 samples" in result.stdout
        and "1 skipped: no token to train on in a row (a.jsonl:9)" in result.stdout
    )


def test_the_context_is_the_model_s(run: Run) -> None:
    assert len(parsed(run("a.txt", "--json", "-n", "1"))[0]["tokens"]) == 64


def test_errors_name_what_is_wrong(run: Run) -> None:
    Path("bad.jsonl").write_text('{"text": "a"}\n{"body": 1}\n')
    assert "bad.jsonl, line 2: no known keys" in str(run("bad.jsonl").exception)
    assert isinstance(run("nowhere").exception, DataError)
    for wrong in (
        ("a.txt", "-n", "0"),
        ("a.txt", "--ctx", "0"),
        ("a.txt", "--pack", "--fill-with-next-samples"),
    ):
        error = run(*wrong).exception
        assert isinstance(error, LlamatrainError) and error.exit_code == 2
    assert run("--ctx", "8").exit_code == 2


def test_numbers_out_of_bounds_are_usage_errors(run: Run) -> None:
    for option, value, takes in (
        ("ctx", 0, "1 to 1048576"),
        ("ctx", 2**20 + 1, "1 to 1048576"),
        ("batch", 2**16 + 1, "1 to 65536"),
    ):
        error = run("a.txt", f"--{option}", str(value)).exception
        assert isinstance(error, UsageError) and error.code == "invalid-option"
        assert str(error) == f"--{option} must be {takes} (got {value})"
    with raises("invalid-option", UsageError, match=r"^-n must be 1 or more.*2\^31 \(got 2147483648\)$"):
        build(PreviewOptions, {"model": Path("m.gguf"), "n": 1 << 31})


def model(**changed: Value) -> None:
    """The model anew, with other values."""
    names = {"context_length": "llama.context_length"}
    values = {names.get(name, f"tokenizer.ggml.{name}"): value for name, value in changed.items()}
    write_arrays(Path("m.gguf"), llama_metadata() | values, llama_tensors())


@pytest.mark.parametrize("length", [u32(0), Value(Kind.INT32, (-5).to_bytes(4, "little", signed=True))])
def test_a_context_that_cannot_be_names_the_model(run: Run, length: Value) -> None:
    model(context_length=length)
    error = run("a.txt").exception
    assert isinstance(error, FileError) and error.code
    assert str(error).startswith("m.gguf: llama.context_length ") and str(length.decode()) in str(error)
    assert run("a.txt", "--ctx", "8").exit_code == 0


def test_a_vocabulary_that_cannot_be_names_the_model(run: Run) -> None:
    model(model=string("unknown"))
    assert str(run("a.txt").exception).startswith("m.gguf: unsupported tokenizer.ggml.model ")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("general.type", string("adapter"), "an adapter; give its base model"),
        ("training.type", string("train_model"), "a checkpoint; give its model"),
    ],
)
def test_a_file_without_a_vocabulary_says_what_it_is(run: Run, key: str, value: Value, said: str) -> None:
    write_arrays(Path("m.gguf"), {"general.architecture": string("llama"), key: value}, {})
    error = run("a.txt").exception
    assert isinstance(error, FileError) and str(error) == f"m.gguf has no vocabulary: this is {said}"


def test_rows_are_made_as_they_are_shown(run: Run) -> None:
    class Counted:
        made, packs = 0, False

        def batch(self, count: int) -> int:
            self.made += 1
            return self.made

    rows = Counted()
    shown = first_rows(rows, PreviewOptions(Path(), n=10**9, batch=2))  # type: ignore[arg-type]
    assert [next(shown)[1] for _ in range(3)] == [0, 1, 0] and rows.made == 2
    assert len(list(first_rows(rows, PreviewOptions(Path(), n=5, batch=2)))) == 5  # type: ignore[arg-type]


def test_an_end_that_is_no_token_is_warned_of(run: Run) -> None:
    tokens = ["<unk>", "<s>", "x", *(f"<0x{i:02X}>" for i in range(256))]
    kinds = numbers(Kind.INT32, [2, 3, 1] + [6] * 256)
    model(
        eos_token_id=u32(999), tokens=strings(tokens), token_type=kinds
    )  # token 2 stands in, which is a letter
    for options in ((), ("--json",)):
        told = run("a.jsonl", "--ctx", "48", *options).stderr
        assert told.startswith("warning: m.gguf: tokenizer.ggml.eos_token_id ") and told.count("\n") == 1
    assert not run("a.txt").stderr
    model(eos_token_id=u32(999))  # token 2 stands in, which is </s>
    assert not run("a.jsonl", "--ctx", "48").stderr
    model(eos_token_id=u32(2), tokens=strings(tokens), token_type=kinds)  # the file's own word is taken
    assert not run("a.jsonl", "--ctx", "48").stderr


@pytest.mark.parametrize(("encoding", "letter"), [("ascii", r"\xe9"), ("utf-8", "é")])
def test_data_cannot_steer_the_terminal(run: Run, encoding: str, letter: str) -> None:
    Path("é.jsonl").write_text(json.dumps({"text": "é\x1b[2J\u202e\nline"}) + '\n{"text": ""}')
    code = "import sys; from llamatrain.cli.main import main; main()"
    arguments = ["preview", "--model", "m.gguf", "--ctx", "48", "-n", "1", "--no-shuffle", "é.jsonl"]
    root = str(Path(llamatrain.__file__).parent.parent)
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": root}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, check=True
    )
    shown = done.stdout.decode(encoding)
    assert letter + r"\x1b[2J\u202e" + "\nline" in shown and "\x1b" not in shown
    assert f"({letter}.jsonl:2)" in shown


# ---- options from fields ---------------------------------------------------


@dataclass(frozen=True)
class Some(Options):
    count: Annotated[int, Option("How many.")]
    rate: Annotated[float, Option("How fast.")] = 0.5
    kind: Annotated[Literal["a", "b"], Option("Which.")] = "a"
    sure: Annotated[bool, Option("Whether.")] = True
    most: Annotated[int | None, Option("At most.")] = None
    files: Annotated[tuple[Path, ...], Option("Some.")] = ()
    scaled: Annotated[tuple[tuple[Path, float], ...], Option("Some with a scale.")] = ()


command = make_app()


@command.command(cls=Command)
@with_options(Some)
def some(**said: Any) -> None:
    typer.echo(repr(build(Some, said | {"of another": 1})))


def test_options_are_made_from_fields() -> None:
    assert CliRunner().invoke(command, ["--count", "1"]).stdout.strip() == repr(Some(1))
    given = [
        "--count=2",
        "--rate=1e-5",
        "--kind=b",
        "--no-sure",
        "--most=3",
        "--files=x",
        "--files=y",
        "--scaled",
        "p",
        "0.5",
    ]
    given += ["--scaled", "q", "2"]
    expected = Some(2, 1e-5, "b", False, 3, (Path("x"), Path("y")), ((Path("p"), 0.5), (Path("q"), 2.0)))
    assert CliRunner().invoke(command, given).stdout.strip() == repr(expected)
    for wrong in ([], ["--count", "x"], ["--count", "1", "--kind", "c"]):
        result = CliRunner().invoke(command, wrong)
        assert getattr(result.exception, "exit_code", result.exit_code) == 2
    assert "How fast. [default: 0.5]" in CliRunner().invoke(command, ["--help"]).stdout
