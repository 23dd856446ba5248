"""Where the figures of a run go besides: each line once, also across a resume, and never at the cost of the run."""

import csv
import importlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llamatrain.report.loggers import LoggerContext, Loggers, tagged_numbers
from llamatrain.report.metrics import Metrics
from tests.helpers.cli import TINY, Argument, Done, ran, run, text_file

STAND_INS = Path(__file__).parents[1] / "stand_ins"


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    monkeypatch.syspath_prepend(str(STAND_INS))
    for name in ("wandb", "trackio"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.delenv(f"{name.upper()}_PROJECT", raising=False)
    yield {name: importlib.import_module(name) for name in ("wandb", "trackio")}
    for name in ("wandb", "trackio"):
        sys.modules.pop(name, None)


def metrics_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def table_in(folder: Path) -> list[dict[str, Any]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [
            {key: json.loads(value) for key, value in row.items() if value}
            for row in csv.DictReader(file, strict=True)
        ]


def trained(place: Path, *more: Argument) -> Done:
    return ran(
        "from-scratch",
        text_file(place),
        *TINY,
        "--ctx",
        32,
        "--batch",
        1,
        "--val-split",
        0.2,
        "--eval-every",
        2,
        *more,
    )


def logged_by(calls: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [told for what, told in calls if what == "log"]


def expected(folder: Path) -> list[dict[str, Any]]:
    return [{**tagged_numbers(line), "step": line["step"]} for line in metrics_in(folder)]


# ---- whole runs ----------------------------------------------------------------


def test_each_line_is_told_once_and_a_resumed_run_goes_on(
    tmp_path: Path, libraries: dict[str, ModuleType]
) -> None:
    wanted = [word for name in ("wandb", "trackio", "csv") for word in ("--log", name)]
    folder = tmp_path / "mine"
    done = trained(
        tmp_path,
        *wanted,
        "--iters",
        4,
        "--save-every",
        2,
        "--note",
        "one, two",
        "--name",
        "first",
        "--out",
        folder,
    )
    assert "wrong stream" in done.err and "wrong stream" not in done.out and "note" in done.err
    wandb, trackio = libraries["wandb"].calls, libraries["trackio"].calls
    ((begin, told), *_), (end, last) = wandb, wandb[-1]
    assert (begin, told["project"], told["name"], told["notes"]) == (
        "init",
        "llamatrain",
        "first",
        "one, two",
    )
    assert told["resume"] == "allow" and told["dir"] == str(folder) and told["config"]["train"]["iters"] == 4
    assert (end, last) == ("finish", {"exit_code": 0}) and trackio[-1] == ("finish", {})
    assert trackio[0][1]["config"]["note"] == "one, two" and trackio[0][1]["resume"] == "allow"
    assert logged_by(wandb) == logged_by(trackio) == expected(folder)
    assert {"train/loss", "train/lr", "train/grad_norm", "step"} <= {
        *logged_by(wandb)[0]
    } and "val/loss" in logged_by(wandb)[2]
    assert table_in(folder) == metrics_in(folder)
    wandb.clear(), trackio.clear()
    for step in (3, 4):  # as if it was killed behind the save at step 2
        (folder / f"checkpoint-{step}.gguf").unlink(missing_ok=True)
    ran("from-scratch", "--resume", folder / "checkpoint-2.gguf", "--iters", 6)
    assert (wandb[0][1]["id"], wandb[0][1]["resume"]) == (told["id"], "allow") and trackio[0][1][
        "name"
    ] == "first"
    assert [line["step"] for line in logged_by(wandb)] == [5, 6, 6]  # those before it has
    assert [line["step"] for line in logged_by(trackio)] == [3, 4, 4, 5, 6, 6]
    assert table_in(folder) == metrics_in(folder)
    assert [row["step"] for row in table_in(folder)] == [1, 2, 2, 3, 4, 4, 5, 6, 6]


def test_what_is_not_installed_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamatrain.report.loggers.find_spec", lambda name: None)
    text = text_file(tmp_path)
    for name, module in {"wandb": "wandb", "trackio": "trackio", "tensorboard": "tensorboardX"}.items():
        done = run(
            "from-scratch",
            text,
            *TINY,
            "--ctx",
            32,
            "--iters",
            1,
            "--log",
            "csv",
            "--log",
            name,
            "--out",
            tmp_path / "run",
        )
        assert done.code == 2 and not (tmp_path / "run").exists()
        assert done.errors == [
            f"error: --log {name} needs {module}, which is not installed; run pip install {module}, or use --log csv [logger-not-installed]"
        ]


def test_words_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    begin = ("from-scratch", text_file(tmp_path), *TINY, "--out", tmp_path / "run")
    assert (
        "--name has no effect without --log to tensorboard, wandb or trackio"
        in run(*begin, "--name", "x").err
    )
    assert "--log must be tensorboard, wandb, trackio or csv" in run(*begin, "--log", "mlflow").err
    assert "must be a name of at most 120 letters" in run(*begin, "--log", "wandb", "--name", "a\nb").err


@pytest.mark.parametrize("fault", ["init", "log", "finish"])
def test_a_logger_that_fails_does_not_end_the_run(
    fault: str, tmp_path: Path, libraries: dict[str, ModuleType]
) -> None:
    libraries["wandb"].fails.add(fault)  # type: ignore[attr-defined]
    done = trained(tmp_path, "--log", "wandb", "--log", "trackio", "--iters", 3, "--out", tmp_path / "run")
    said = [line for line in done.err.splitlines() if "--log wandb" in line]
    assert said == [
        f"warning: --log wandb: {fault}: the network is gone; logging there has stopped (metrics.jsonl has all lines)"
    ]
    assert logged_by(libraries["trackio"].calls) == expected(tmp_path / "run")


def test_what_nobody_asked_for_is_not_loaded(tmp_path: Path) -> None:
    """Not even where it is installed."""
    program = (
        "import sys; sys.argv[1:] = sys.argv[1:]\n"
        "from llamatrain.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: print(sorted({'wandb', 'trackio', 'tensorboardX', 'pyarrow', 'zstandard', 'gzip'} & {*sys.modules}))"
    )
    words = (
        "from-scratch",
        text_file(tmp_path),
        *TINY,
        "--ctx",
        32,
        "--iters",
        1,
        "--batch",
        1,
        "--out",
        tmp_path / "run",
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(STAND_INS), *filter(None, sys.path)])}
    command = [sys.executable, "-c", program, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    assert done.stdout.strip() == "[]", done.stderr


# ---- one by one ------------------------------------------------------------------


def lines(*steps: int) -> list[dict[str, Any]]:
    return [{"step": step, "loss": step / 8, "lr": 0.5, "tokens": 10**13} for step in steps]


def loggers(metrics: Metrics, *names: str, step: int = 0, note: str = "") -> list[str]:
    """They are told what the metrics are; and what goes wrong."""
    said = list[str]()
    told = LoggerContext(
        folder=lambda: metrics.path.parent, name="a", note=note, options={}, step=step, lines=metrics.lines
    )
    metrics.sink = Loggers(names, told, said.append)
    return said


def events_in(folder: Path) -> list[Any]:
    """Records of a length, its sum, data and their sum; files in the order in which they were begun."""
    from tensorboardX.proto import event_pb2
    from tensorboardX.record_writer import masked_crc32c

    found = []
    for path in sorted((folder / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack_from("Q", data, at)
            assert struct.unpack_from("I", data, at + 8)[0] == masked_crc32c(data[at : at + 8])
            body = data[at + 12 : at + 12 + size]
            assert struct.unpack_from("I", data, at + 12 + size)[0] == masked_crc32c(body)
            found.append(event_pb2.Event.FromString(body))
            at += size + 16
    return found


def points(events: list[Any]) -> list[tuple[str, int, float]]:
    """What is shown: of what lies behind a session's begin the older is passed over."""
    shown: list[tuple[str, int, float]] = []
    for event in events:
        if event.session_log.status:
            shown = [point for point in shown if point[1] < event.step]
        shown += [
            (value.tag, event.step, value.simple_value)
            for value in event.summary.value
            if not value.HasField("tensor")
        ]
    return shown


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    with Metrics.create(tmp_path / "metrics.jsonl") as metrics:
        said = loggers(metrics, "tensorboard", note="one, two")
        for line in (*lines(1, 2, 3), {"step": 3, "val_loss": 2.5}):
            metrics.write(line)
    found = events_in(tmp_path)
    assert found[0].file_version == "brain.Event:2" and not said
    texts = [
        value.tensor.string_val[0]
        for event in found
        for value in event.summary.value
        if value.HasField("tensor")
    ]
    assert texts == [b"a", b"one, two"]
    assert [point for point in points(found) if point[0] == "train/loss"] == [
        ("train/loss", step, step / 8) for step in (1, 2, 3)
    ]
    assert points(found)[-1] == ("val/loss", 3, 2.5)
    with Metrics.resume(tmp_path / "metrics.jsonl", 2) as metrics:
        loggers(metrics, "tensorboard", step=2)
        for line in lines(3, 4):
            metrics.write(line | {"loss": 1.0})
    shown = points(events_in(tmp_path))
    assert [point for point in shown if point[0] == "train/loss"] == [
        ("train/loss", 1, 0.125),
        ("train/loss", 2, 0.25),
        ("train/loss", 3, 1.0),
        ("train/loss", 4, 1.0),
    ]
    assert "val/loss" not in [tag for tag, _, _ in shown]
    with Metrics.create(tmp_path / "metrics.jsonl") as metrics:  # of a run that replaces it
        loggers(metrics, "tensorboard")
        metrics.write({"step": 0, "val_loss": 1.0})
    assert points(events_in(tmp_path)) == [("val/loss", 0, 1.0)]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 3


def test_a_logger_that_is_new_to_a_run_is_told_its_beginning(
    tmp_path: Path, libraries: dict[str, ModuleType]
) -> None:
    with Metrics.create(tmp_path / "metrics.jsonl") as metrics:
        for line in lines(1, 2):
            metrics.write(line)
    with Metrics.resume(tmp_path / "metrics.jsonl", 2) as metrics:
        loggers(metrics, "trackio", "csv", step=2)
        metrics.write(lines(3)[0])
    assert [line["step"] for line in logged_by(libraries["trackio"].calls)] == [1, 2, 3]
    assert table_in(tmp_path) == lines(1, 2, 3)


def test_a_table_grows_by_columns(tmp_path: Path) -> None:
    with Metrics.create(tmp_path / "metrics.jsonl") as metrics:
        said = loggers(metrics, "csv")
        written = [
            *lines(1),
            {"step": 1, "val_loss": 0.5, "a": 'x "y", z'},
            {"step": 2, "loss": float("inf")},
            *lines(3),
        ]
        for line in written:
            metrics.write(line)
        rows = (tmp_path / "metrics.csv").read_text().splitlines()  # while it runs
    assert not said and rows == [
        "step,loss,lr,tokens,val_loss,a",
        "1,0.125,0.5,10000000000000,,",
        '1,,,,0.5,"x ""y"", z"',
        "2,,,,,",
        "3,0.375,0.5,10000000000000,,",
    ]


def test_disks_that_take_no_more_are_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Metrics.create(tmp_path / "metrics.jsonl") as metrics:
        said = loggers(metrics, "csv")
        (tmp_path / "metrics.csv").mkdir()
        for line in lines(1, 2, 3):
            metrics.write(line)
    assert len(said) == 1 and said[0].startswith("--log csv: ") and "this is a folder" in said[0]
    assert len(metrics_in(tmp_path)) == 3


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"wandb": 1}', '{"wandb": {"id": 1}}', '{"os": {"id": "x"}}', '{"wandb": {"x": "y"}}'],
)
def test_a_damaged_file_of_names_begins_another_run(
    text: str, tmp_path: Path, libraries: dict[str, ModuleType]
) -> None:
    (tmp_path / "loggers.json").write_text(text)
    with Metrics.create(tmp_path / "metrics.jsonl") as metrics:
        said = loggers(metrics, "wandb")
        metrics.write(lines(1)[0])
    begun = libraries["wandb"].calls[0][1]
    assert not said and len(begun["id"]) == 8 and begun["name"] == "a"
    assert json.loads((tmp_path / "loggers.json").read_text()) == {
        "wandb": {key: begun[key] for key in ("project", "name", "id")}
    }
