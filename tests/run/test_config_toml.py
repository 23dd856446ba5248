"""The config.toml that a run writes says the same run again: also one that was resumed, or that a base was tuned in."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.values import string
from tests.helpers.cli import losses, ran, same_bits, steps, text_file
from tests.helpers.lora_runs import base
from tests.helpers.small_models import small
from tests.helpers.tiny_checkpoint import forge

SMALL = (
    "--size",
    "tiny",
    "--layer",
    1,
    "--vocab-size",
    300,
    "--ctx",
    32,
    "--batch",
    2,
    "--precision",
    "f32",
    "--seed",
    3,
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path, 4000)
    return tmp_path


def config(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "config.toml").read_text())


def test_of_a_run_that_was_resumed(place: Path) -> None:
    ran("from-scratch", "text.txt", *SMALL, "--iters", 4, "--out", "run")
    before = config(place / "run")
    ran("from-scratch", "--resume", "run", "--iters", 5)
    assert config(place / "run") == before | {"iters": 5}
    ran("from-scratch", "--config", "run/config.toml", "--out", "again")
    assert losses(place / "again") == losses(place / "run")
    same_bits(place / "again" / "model.gguf", place / "run" / "model.gguf")


def test_of_a_run_that_began_with_a_model(place: Path) -> None:
    ran("from-scratch", "text.txt", *SMALL, "--iters", 1, "--out", "first")
    ran(
        "from-scratch",
        "text.txt",
        "--checkpoint-in",
        "first/model.gguf",
        "--precision",
        "f32",
        "--iters",
        2,
        "--out",
        "run",
    )
    ran("from-scratch", "--resume", "run", "--iters", 3)
    told = config(place / "run")
    assert not {"size", "vocab-size"} & told.keys()
    head = (place / "run" / "config.toml").read_text().splitlines()[0]
    assert head == f"# llamatrain from-scratch --checkpoint-in {place / 'first' / 'model.gguf'} --config FILE"
    ran(*head.removeprefix("# llamatrain ").replace("FILE", "run/config.toml").split(), "--out", "again")
    assert losses(place / "again") == losses(place / "run")


@pytest.mark.parametrize("full", [False, True])
def test_of_a_base(full: bool, place: Path) -> None:
    base(place / "base.gguf", small(), "F16")
    more = ("--full",) if full else ("--lora-r", 3)
    ran(
        "finetune",
        "base.gguf",
        "text.txt",
        *more,
        "--batch",
        2,
        "--iters",
        2,
        "--precision",
        "f32",
        "--out",
        "run",
    )
    ran("finetune", "--resume", "run", "--iters", 3)
    told = config(place / "run")
    assert (told["base"], told["data"]) == (str(place / "base.gguf"), [str(place / "text.txt")])
    ran("finetune", "--config", "run/config.toml", "--out", "again")
    assert losses(place / "again") == losses(place / "run")


def test_a_time_is_for_the_run_that_it_was_given_to(place: Path) -> None:
    done = ran(
        "from-scratch",
        "text.txt",
        *SMALL,
        "--iters",
        1_000_000,
        "--max-time",
        "1s",
        "--save-every",
        0,
        "--out",
        "run",
    )
    assert "the time is up" in done.err
    assert kept(place / "run")["run"]["max_time"] is None and "max-time" not in config(place / "run")
    step, latest = len(steps(place / "run")), place / "run" / "checkpoint-LATEST.gguf"
    told = kept(place / "run")
    told["run"]["max_time"] = 0.001  # as it was kept once
    forge(latest, place / "before.gguf", {"training.options": string(json.dumps(told))})
    assert (
        "the time is up"
        not in ran(
            "from-scratch", "--resume", "before.gguf", "--trust", "--iters", step + 3, "--out", "on"
        ).err
    )
    assert steps(place / "on")[-1]["step"] == step + 3
    assert "max-time" not in config(place / "on")


def kept(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        open_gguf(folder / "checkpoint-LATEST.gguf").get_value("training.options", str)
    )
    return found
