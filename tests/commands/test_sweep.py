"""Sweeps: lists of values, rounds, the folder, resuming, and what can go wrong."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import llamatrain
from llamatrain.checkpoints.lock import lock_folder
from llamatrain.commands.sweep import names_model
from llamatrain.commands.sweep_grid import (
    SweepOptions,
    combinations,
    parse_value,
    round_steps,
    specs_of,
    split_arguments,
)
from llamatrain.commands.sweep_state import Sweep, Trial, total_steps
from llamatrain.errors import UsageError
from llamatrain.gguf.reader import open_gguf
from llamatrain.report.sweep_page import SweepRow, sweep_page
from tests.helpers.cli import ran, ran_apart, run, text
from tests.helpers.errors import raises
from tests.helpers.lora_runs import WIDE, base
from tests.run.test_from_scratch_errors import refused

CONFIG = """
embd = 32
head = 4
layer = 1
ctx = 16
vocab-size = "bytes"
batch = 2
iters = 9
val-split = 0.1
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(CONFIG)
    (tmp_path / "text.txt").write_text(text(3000))
    return tmp_path


def weights(path: Path) -> dict[str, bytes]:
    return {name: tensor.raw.tobytes() for name, tensor in open_gguf(path).tensors.items()}


# ---- lists and rounds --------------------------------------------------------------------------


def test_lists_on_a_command_line() -> None:
    specs = specs_of("finetune")
    words = [
        "--lr",
        "1e-4,3e-4",
        "--lora-r=8,16",
        "--target",
        "attn_q,attn_v;output",
        "--no-pack",
        "--full",
        "on,off",
    ]
    found = split_arguments(words, specs)
    assert found == {
        "lr": ["1e-4", "3e-4"],
        "lora_r": ["8", "16"],
        "target": ["attn_q,attn_v", "output"],
        "pack": ["off"],
        "full": ["on", "off"],
    }
    assert parse_value("on", specs["full"]) is True and parse_value("3e-4", specs["lr"]) == 3e-4


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--lr", "1e-4,"], "invalid-list"),
        (["--lr", ""], "invalid-list"),
        (["--lr", "1,1"], "invalid-list"),
        (["--lr", "1", "--lr", "1"], "invalid-list"),
        (["--full="], "invalid-list"),
        (["--no-pack=on"], "unexpected-value"),
        (["--lr"], "missing-value"),
        (["--lrr", "1"], "unknown-option"),
        (["--out", "x"], "unknown-option"),
        (["--lr", "1", "data.txt"], "extra-argument"),
    ],
)
def test_wrong_lists(words: list[str], code: str) -> None:
    with raises(code, UsageError):
        split_arguments(words, specs_of("finetune"))


def test_every_combination_or_a_sample() -> None:
    lists = {"lr": ["1", "2", "3"], "batch": ["4", "8"]}
    every = combinations(lists, SweepOptions())
    assert (
        len(every) == 6 and every[0] == {"lr": "1", "batch": "4"} and every[-1] == {"lr": "3", "batch": "8"}
    )
    some = combinations(lists, SweepOptions(sample=4, sample_seed=1))
    assert len(some) == 4 and [each for each in every if each in some] == some
    assert some == combinations(lists, SweepOptions(sample=4, sample_seed=1))
    with raises("too-many-runs", UsageError):
        combinations({name: [str(n) for n in range(101)] for name in "ab"}, SweepOptions())


@pytest.mark.parametrize(
    ("trials", "options", "wanted"),
    [
        (9, SweepOptions(), [100, 300, 900]),
        (4, SweepOptions(), [100, 300, 900]),
        (3, SweepOptions(), [300, 900]),
        (8, SweepOptions(halving=2), [112, 225, 450, 900]),
        (8, SweepOptions(halving=1), [900]),
        (8, SweepOptions(rounds=2), [300, 900]),
    ],
)
def test_rounds(trials: int, options: SweepOptions, wanted: list[int]) -> None:
    assert round_steps(900, trials, options) == wanted


def test_few_steps_have_few_rounds() -> None:
    assert round_steps(2, 81, SweepOptions()) == [1, 2]


def sweep_of(losses: list[list[float]], steps: list[int]) -> Sweep:
    trials = [Trial(values={"lr": str(n)}, folder=f"{n}", losses=each) for n, each in enumerate(losses)]
    return Sweep(command="from-scratch", base="", files=[], fixed={}, halving=3, steps=steps, trials=trials)


def test_the_best_third_goes_on() -> None:
    sweep = sweep_of([[5.0], [1.0], [float("inf")], [3.0], [2.0], [4.0]], [3, 9])
    assert [trial.folder for trial in sweep.members(1)] == ["1", "4"]
    assert [trial.folder for trial in sweep.best] == ["1", "4", "3", "5", "0", "2"]
    sweep.trials[1].losses.append(9.0)
    assert sweep.best[0].folder == "1"  # it came further than the others
    assert total_steps(sweep) == 6 * 3 + 2 * 6


def test_runs_that_diverge_never_go_on() -> None:
    assert sweep_of([[float("inf")], [float("inf")], [float("inf")]], [3, 9]).members(1) == []


# ---- whole sweeps ------------------------------------------------------------------------------


def test_the_best_run_is_the_one_that_was_trained_at_once(place: Path) -> None:
    words = ("sweep", "c.toml", "text.txt", "--lr", "1e-5,1e-2,1e-3", "--seed", "5", "--json")
    found = json.loads(ran(*words).out)
    assert found["steps"] == [3, 9]
    assert found["runs"][0]["values"]["lr"] == "1e-2"
    assert [len(each["losses"]) for each in found["runs"]] == [2, 1, 1]
    ran("from-scratch", "text.txt", "--config", "c.toml", "--lr", "1e-2", "--seed", 5, "--out", "plain")
    assert weights(Path(found["best"]) / "model.gguf") == weights(Path("plain/model.gguf"))
    page = (place / "runs" / "sweep-1" / "sweep.html").read_text()
    assert all(value in page for value in ("1e-5", "1e-2", "1e-3", "step 9", "<svg"))


def test_the_table(place: Path) -> None:
    done = ran("sweep", "c.toml", "text.txt", "--lr", "1e-5,1e-2", "--layer", "1,2", "--halving", 1)
    head, *lines = done.out.splitlines()
    assert head.split() == ["lr", "layer", "step", "9"]
    losses = [float(line.split()[-1]) for line in lines]
    assert len(lines) == 4 and losses == sorted(losses)
    assert "sweep-1" in done.err


def test_finetune_with_the_base_after_the_config(place: Path) -> None:
    base(place / "base.gguf", WIDE)
    (place / "f.toml").write_text("iters = 4\nval-split = 0.1\nctx = 16\nbatch = 2\n")
    done = ran("sweep", "f.toml", "base.gguf", "text.txt", "--lora-r", "2,4", "--lr", "1e-3", "--json")
    found = json.loads(done.out)
    assert {each["values"]["lora_r"] for each in found["runs"]} == {"2", "4"}
    assert (Path(found["best"]) / "adapter.gguf").is_file()


def test_a_stopped_sweep_goes_on(place: Path) -> None:
    words = ["sweep", "c.toml", "text.txt", "--lr", "1e-3,1e-2,3e-3", "--iters", "300", "--out", "s"]
    child = subprocess.Popen([sys.executable, "-m", "llamatrain", *words], stderr=subprocess.PIPE)
    until = time.monotonic() + 120
    while not list(place.glob("s/02*/metrics.jsonl")) and time.monotonic() < until:
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=120)
    if child.returncode:  # otherwise it was faster
        assert b"llamatrain sweep --resume s" in err, err
    found = json.loads(ran("sweep", "--resume", "s", "--json").out)
    whole = json.loads(ran(*words[:-1], "t", "--json").out)
    assert [each["losses"] for each in found["runs"]] == [each["losses"] for each in whole["runs"]]
    best = (Path(each["best"]) / "model.gguf" for each in (found, whole))
    assert weights(next(best)) == weights(next(best))


AT_LAST_STEP = """
def stop(self, line, call=sweep.StopAtStep.__call__):
    ended = call(self, line)
    if ended:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
    return ended
sweep.StopAtStep.__call__ = stop
"""
BETWEEN_RUNS = """
def draw(*arguments):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
sweep.draw_page = draw
"""


@pytest.mark.skipif(sys.platform == "win32", reason="a process cannot send Ctrl-C to itself alone")
@pytest.mark.parametrize("change", [AT_LAST_STEP, BETWEEN_RUNS])
def test_ctrl_c_at_the_end_of_a_run(change: str, place: Path) -> None:
    program = f"import os, signal, time\nfrom llamatrain.commands import sweep\n{change}\n"
    program += "from llamatrain.cli.main import main\nmain()"
    words = ["sweep", "c.toml", "text.txt", "--lr", "1e-3,1e-2,3e-3", "--out", "s"]
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 130 and not done.stdout
    assert done.stderr.count("llamatrain sweep --resume s") == 1, done.stderr
    stored = json.loads((place / "s/sweep.json").read_text())["trials"]
    assert not any(each["losses"] for each in stored[1:]) and not any(each["error"] for each in stored)
    found = json.loads(ran("sweep", "--resume", "s", "--json").out)
    whole = json.loads(ran("sweep", *words[1:-1], "t", "--json").out)
    assert [each["losses"] for each in found["runs"]] == [each["losses"] for each in whole["runs"]]


def test_a_run_that_fails_does_not_end_the_sweep(place: Path) -> None:
    found = json.loads(ran_apart("sweep", "c.toml", "text.txt", "--memory", "8KB,1GB", "--json").out)
    failed = [each for each in found["runs"] if each["error"]]
    assert [each["values"]["memory"] for each in failed] == ["8KB"] and found["runs"][-1] == failed[0]


def test_a_run_that_was_killed_before_its_result_is_completed(place: Path) -> None:
    found = json.loads(ran("sweep", "c.toml", "text.txt", "--lr", "1e-5,1e-2", "--out", "s", "--json").out)
    best, other = (Path(each["folder"]) for each in found["runs"])
    whole = weights(best / "model.gguf")
    state = json.loads((place / "s/sweep.json").read_text())
    next(each for each in state["trials"] if best.name == each["folder"])["losses"].pop()
    (place / "s/sweep.json").write_text(json.dumps(state))
    (best / "model.gguf").unlink()  # metrics have the last validation, but the save did not happen
    (best / "model.gguf").write_bytes((other / "model.gguf").read_bytes())
    (best / "checkpoint-9.gguf").unlink()
    (best / "checkpoint-LATEST.gguf").unlink()
    again = json.loads(ran("sweep", "--resume", "s", "--json").out)
    assert again == found and weights(best / "model.gguf") == whole


def test_runs_that_failed_are_tried_again(place: Path) -> None:
    state = place / "s" / "sweep.json"
    words = ("c.toml", "text.txt", "--lr", "1e-5,1e-2", "--iters", 2, "--out", "s")
    wanted = json.loads(ran("sweep", *words, "--json").out)
    stored = json.loads(state.read_text())
    for trial in stored["trials"]:
        trial["losses"], trial["error"] = [], "text.txt: no such file"
    state.write_text(json.dumps(stored))
    assert json.loads(ran("sweep", "--resume", "s", "--json").out) == wanted


def test_two_processes_in_one_folder(place: Path) -> None:
    ran("sweep", "c.toml", "text.txt", "--lr", "1e-5,1e-2", "--iters", 2, "--out", "s")
    lock = lock_folder(place / "s")
    refused(run("sweep", "--resume", "s"), 1, "s: another run is using this folder")
    lock.release()
    ran("sweep", "--resume", "s")


def test_runs_that_all_diverge(place: Path) -> None:
    done = run("sweep", "c.toml", "text.txt", "--lr", "1e25,1e30", "--json")
    refused(done, 1, "every run failed")
    assert not done.out


def test_values_are_escaped_in_the_page() -> None:
    row = SweepRow(values={"target": "<b>&"}, losses=(), error="<i>", folder="<u>")
    page = sweep_page("<h1>", [1], [row], [])
    assert "&lt;b&gt;&amp;" in page and not any(tag in page for tag in ("<b>", "<i>", "<u>", "<h1><"))


def test_models_and_data_behind_the_config(place: Path) -> None:
    assert all(map(names_model, ("a.gguf", "ollama:qwen3", "hf:owner/name", "https://x/y.gguf")))
    assert not any(map(names_model, ("text.txt", "hf:datasets/owner/name", "https://x/y.txt", ".")))


def test_a_folder_that_cannot_be_made(place: Path) -> None:
    refused(run("sweep", "c.toml", "text.txt", "--lr", "1,2", "--out", "text.txt/s"), 1, "cannot be created")


def test_python(place: Path) -> None:
    found = llamatrain.sweep("c.toml", "text.txt", lr=[1e-5, 1e-2], seed=5, out="s")
    assert isinstance(found, llamatrain.SweepResult)
    assert found.runs[0].values == {"lr": "0.01"} and found.best == Path("s/02_lr-0.01")
    assert llamatrain.sweep(resume="s").runs == found.runs
    with raises("unknown-option", UsageError):
        llamatrain.sweep("c.toml", "text.txt", lrr=[1, 2])
    with raises("missing-config", UsageError):
        llamatrain.sweep(lr=[1, 2])


# ---- what is refused ---------------------------------------------------------------------------

REFUSED: dict[str, tuple[list[Any], str]] = {
    "no config": ([], "CONFIG is missing"),
    "no list": (["c.toml", "text.txt", "--lr", "1e-3"], "several values"),
    "another number of steps": (["c.toml", "text.txt", "--iters", "3,4"], "same number of steps"),
    "a sample of one": (["c.toml", "text.txt", "--lr", "1,2", "--sample", "1"], "--sample 2"),
    "epochs": (["c.toml", "text.txt", "--lr", "1,2", "--epochs", "1"], "--iters"),
    "no validation": (["c.toml", "text.txt", "--lr", "1,2", "--val-split", "0"], "--val"),
    "no validation steps": (["c.toml", "text.txt", "--lr", "1,2", "--eval-every", "0"], "--eval-every"),
    "a wrong value": (["c.toml", "text.txt", "--lr", "1,x"], "--lr must be a number"),
    "a contradiction": (["c.toml", "text.txt", "--lr", "1,2", "--head", "5"], "5"),
    "an unknown option": (["c.toml", "text.txt", "--lrr", "1,2"], "did you mean --lr"),
    "rounds without halving": (
        ["c.toml", "text.txt", "--lr", "1,2", "--halving", "1", "--rounds", "2"],
        "--rounds",
    ),
    "a short flag": (["c.toml", "text.txt", "-x", "1,2"], "long flags"),
    "resume and more": (["c.toml", "--resume", "x"], "leave out the rest"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_before_anything_is_written(kind: str, place: Path) -> None:
    words, says = REFUSED[kind]
    refused(run("sweep", *words), 2, says)
    assert not (place / "runs").exists()


def test_a_folder_with_a_sweep_is_kept(place: Path) -> None:
    ran("sweep", "c.toml", "text.txt", "--lr", "1e-3,1e-2", "--out", "s", "--iters", 2)
    refused(run("sweep", "c.toml", "text.txt", "--lr", "1,2", "--out", "s"), 1, "--resume s")


@pytest.mark.parametrize(
    "change",
    [
        lambda stored: "{",
        lambda stored: json.dumps([stored]),
        lambda stored: json.dumps(stored | {"trials": []}),
        lambda stored: json.dumps(stored | {"steps": ["a"]}),
        lambda stored: json.dumps(stored | {"more": 1}),
        lambda stored: json.dumps(stored | {"command": "merge"}),
        lambda stored: json.dumps(stored | {"trials": [stored["trials"][0] | {"losses": [1] * 9}]}),
        lambda stored: json.dumps(stored | {"fixed": {"nothing": "1"}}),
        lambda stored: json.dumps(stored | {"trials": [stored["trials"][0] | {"folder": "../x"}]}),
        lambda stored: json.dumps(stored | {"trials": [stored["trials"][0] | {"losses": ["x"]}]}),
    ],
)
def test_a_damaged_sweep(change: Any, place: Path) -> None:
    ran("sweep", "c.toml", "text.txt", "--lr", "1e-3,1e-2", "--out", "s", "--iters", 1)
    file = place / "s" / "sweep.json"
    file.write_text(change(json.loads(file.read_text())))
    refused(run("sweep", "--resume", "s"), 1, "sweep.json", "damaged")
