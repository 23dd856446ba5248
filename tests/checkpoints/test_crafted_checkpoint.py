"""Checkpoints whose checksum is right and whose words are not: going on from one works, or ends in one line, and soon."""

import json
import math
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.checkpoints import checkpoint
from llamatrain.checkpoints.checkpoint import GRADIENTS
from llamatrain.checkpoints.read import read_checkpoint
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.values import Kind, Value, number, string
from llamatrain.train.state import PartialStep
from tests.helpers.cli import TINY, Done, ran, run, text_file
from tests.helpers.lora_runs import base
from tests.helpers.small_models import small
from tests.helpers.timeout import in_time
from tests.helpers.tiny_checkpoint import forge

WORDS = ("training.options", "training.extra", "training.partial")
SECONDS = 20  # of the processor, that nothing may take
GONE = object()  # in the place of a value: its key is taken away
STRANGE: list[Any] = [
    GONE,
    None,
    True,
    "",
    "text",
    "x" * 5000,
    "-",
    "a\0b",
    [],
    ["x"],
    [None],
    {},
    {"a": 1},
    -1,
    0,
    1,
    2**31 - 1,
    2**31,
    2**63,
    -(2**63),
    0.5,
    1e-300,
    1e308,
    float("nan"),
    float("inf"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of each command one that was left in the middle of a step."""
    place = tmp_path_factory.mktemp("runs")
    base(place / "base.gguf", small(), "Q8_0")
    data = text_file(place, 3000)
    more = (
        "--batch",
        2,
        "--grad-acc",
        2,
        "--ctx",
        32,
        "--iters",
        2,
        "--val-split",
        0.2,
        "--precision",
        "f32",
        "--seed",
        5,
    )
    ran("from-scratch", data, *TINY, *more, "--out", place / "from-scratch")
    ran(
        "finetune",
        place / "base.gguf",
        data,
        *more,
        "--lora-scaled",
        adapter(place),
        0.5,
        "--out",
        place / "finetune",
    )
    return {
        name: halved(place / name / "checkpoint-2.gguf", place / f"{name}.gguf")
        for name in ("from-scratch", "finetune")
    }


def adapter(place: Path) -> Path:
    from tests.helpers.lora_runs import random_adapter

    path = place / "mixed.gguf"
    random_adapter(path, small(), ["blk.0.attn_v.weight"])
    return path


def halved(path: Path, target: Path) -> Path:
    """As it would be after the first micro-batch of its next step; that is its third of four."""
    found = read_checkpoint(path)
    assert found.state.data
    elements = sum(found.weights[name].size for name in found.order)
    found.vectors[GRADIENTS] = np.ones(elements, np.float32)
    found.state.partial = PartialStep([0.5], 0.1)
    found.options["train"]["iters"] = 4
    checkpoint.write_checkpoint(target, found)
    return target


def gone_on(command: str, path: Path, folder: Path) -> Done:
    shutil.rmtree(folder, ignore_errors=True)
    with in_time(SECONDS):
        return run(command, "--resume", path, "--iters", 4, "--out", folder, "--trust")


def check(command: str, source: Path, values: dict[str, Value | None], place: Path, what: object) -> bool:
    """Whether it was gone on with."""
    crafted = forge(source, place / "crafted.gguf", values)
    done = gone_on(command, crafted, place / "run")
    assert done.code == 0 or (len(done.errors) == 1 and done.code in (1, 2)), (what, done.err)
    assert "Traceback" not in done.err, (what, done.err)
    return done.code == 0


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of all that a value holds, itself too."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from places(each, (*path, key))


def changed(value: Any, path: tuple[Any, ...], to: Any) -> Any:
    if not path:
        return {} if to is GONE else to
    made = json.loads(json.dumps(value))
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    if to is GONE:
        del inner[path[-1]]
    else:
        inner[path[-1]] = to
    return made


def crafted(source: Path) -> list[tuple[str, tuple[Any, ...], Any]]:
    words = {key: json.loads(open_gguf(source).get_value(key, str)) for key in WORDS}
    return [(key, path, to) for key in WORDS for path in places(words[key]) for to in STRANGE]


@pytest.mark.parametrize("command", ["from-scratch", "finetune"])
@pytest.mark.parametrize("count", [25, pytest.param(100_000, marks=pytest.mark.slow)])
def test_words_that_cannot_be(
    command: str, count: int, runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some of the words are names
    source = runs[command]
    assert gone_on(command, source, tmp_path / "sound").code == 0
    cases, passed = crafted(source), 0
    for key, path, to in random.Random(count).sample(cases, min(count, len(cases))):
        told = json.loads(open_gguf(source).get_value(key, str))
        text = json.dumps(changed(told, path, to))
        passed += check(command, source, {key: string(text)}, tmp_path, (key, path, to))
    assert 0 < passed < count


@pytest.mark.parametrize(
    ("key", "path", "to"),
    [
        ("training.partial", ("extra",), {}),
        ("training.partial", ("extra", "seconds"), "text"),
        ("training.partial", ("extra", "seconds"), [1.0]),
        ("training.options", ("train", "lr_min"), None),
        ("training.options", ("command",), None),
        ("training.options", ("command",), ["finetune"]),
        ("training.options", ("base",), None),
        ("training.options", ("run", "threads"), 2**31 - 1),
        ("training.options", ("files",), ["a\0b"]),
        ("training.options", ("files",), ["a\0b*"]),
        ("training.options", ("files",), ["\ud800x"]),
        ("training.options", ("data", "val"), ["\ud800x"]),
        ("training.options", ("run", "note"), "\ud800x"),
        ("training.extra", ("base",), "\udfff"),
        ("training.extra", ("alpha",), "text"),
        ("training.extra", ("scales", "blk.0.attn_q.weight"), "text"),
        ("training.extra", ("ranks", "blk.0.attn_q.weight"), 2**62),
        ("training.extra", ("ranks", "blk.0.attn_q.weight"), -1),
        ("training.extra", ("owed_validation",), "text"),
        ("training.extra", ("ended",), 7),
        ("training.extra", ("best_validation",), "text"),
        ("training.extra", ("best_validation",), {"loss": 1.5, "step": 99, "idle": 0}),
        ("training.extra", ("best_validation",), {"loss": math.nan, "step": 1, "idle": 0}),
        ("training.extra", ("best_validation",), {"loss": 10**400, "step": 0, "idle": 0}),
        ("training.extra", ("best_validation",), {"loss": None, "step": None, "idle": -1}),
    ],
)
def test_those_that_ended_in_a_traceback(
    key: str, path: tuple[str, ...], to: Any, runs: dict[str, Path], tmp_path: Path
) -> None:
    told = json.loads(open_gguf(runs["finetune"]).get_value(key, str))
    assert not check(
        "finetune", runs["finetune"], {key: string(json.dumps(changed(told, path, to)))}, tmp_path, path
    )


def test_what_does_not_fit_is_refused_before_anything_is_written(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    folder, source = tmp_path / "run", runs["finetune"]
    shutil.copytree(source.parent / "finetune", folder)
    told = json.loads(open_gguf(source).get_value("training.extra", str))
    told["ranks"]["blk.0.attn_q.weight"] = 3
    forge(source, folder / "checkpoint-3.gguf", {"training.extra": string(json.dumps(told))})
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    done = run("finetune", "--resume", folder, "--iters", 4, "--trust")
    assert done.code == 1 and "blk.0.attn_q.weight.lora_a is" in done.err
    assert before == {file.name: file.read_bytes() for file in folder.iterdir()}


COUNTS = ("iteration_count", "sample_count", "token_count", "epoch_count", "no_improvement_count")
SHUFFLE = ("shuffle.seed", "shuffle.epoch", "shuffle.next_sample", "shuffle.next_row")


@pytest.mark.parametrize("key", [f"training.{name}" for name in (*COUNTS, *SHUFFLE)])
@pytest.mark.parametrize("value", [2**62, 2**64 - 1])
def test_counts_that_cannot_be(key: str, value: int, runs: dict[str, Path], tmp_path: Path) -> None:
    check("from-scratch", runs["from-scratch"], {key: number(Kind.UINT64, value)}, tmp_path, (key, value))


@pytest.mark.parametrize("growth", [1.0, 1.000000001])
def test_a_schedule_of_many_periods_is_soon_told(
    growth: float, runs: dict[str, Path], tmp_path: Path
) -> None:
    """A period of one step that begins again for ever, two thousand million steps in."""
    source = runs["from-scratch"]
    told = json.loads(open_gguf(source).get_value("training.options", str))
    told["train"] |= {"restart_growth": growth, "decay_steps": 1, "iters": 2**31 - 1}
    values = {
        "training.options": string(json.dumps(told)),
        "training.iteration_count": number(Kind.UINT64, 2**31 - 3),
    }
    crafted = forge(source, tmp_path / "crafted.gguf", values)
    with in_time(SECONDS):
        done = run("from-scratch", "--resume", crafted, "--out", tmp_path / "run", "--trust")
    assert done.code == 0, done.err
