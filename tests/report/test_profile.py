"""What `--profile` tells of a run: a table whose figures add up, a trace that Chrome opens, and nothing else than without it."""

import builtins
import json
import re
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from llamatrain.engine.device import create_device
from llamatrain.engine.profiler import IMPORTS, Recorder
from llamatrain.engine.program import Program
from llamatrain.graph import ops as O
from llamatrain.graph.tensor import parameter, placeholder
from llamatrain.report.profile import profile_table
from tests.helpers.cli import (
    TINY,
    Argument,
    Done,
    finished,
    lines,
    ran,
    run,
    same_bits,
    started,
    text_file,
    timeless,
    until,
)
from tests.helpers.small_models import small, weights, written

NEW = (*TINY, "--ctx", 32, "--batch", 2, "--val-split", 0.2, "--eval-every", 2, "--seed", 5, "--threads", 1)
GROUPED = ("--iters", 2, "--grad-acc", 2, "--threads", 2)
ROW = re.compile(
    r"  (?P<op>\w+) +(?P<part>forward|again|backward|optimizer) +(?P<calls>[\d.,]+) +(?P<ms>[\d.,]+) +(?P<share>[\d.]+) %"
    r"(?P<rate>.*)"
)


def trained(folder: Path, *more: Argument) -> Done:
    return ran("from-scratch", text_file(folder), *NEW, "--iters", 5, "--out", folder / "run", *more)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Done, Path]:
    folder = tmp_path_factory.mktemp("profiled")
    return trained(folder, "--profile"), folder / "run"


def number(text: str) -> float:
    return float(text.replace(",", ""))


def told(err: str, name: str) -> list[float]:
    """The numbers of a row of the table."""
    (row,) = [line for line in err.splitlines() if line.startswith(f"  {name}  ")]
    return [number(each) for each in re.findall(r"[\d.,]+", row.removeprefix(f"  {name}"))]


def rows(err: str) -> list[dict[str, str]]:
    return [match.groupdict() for line in err.splitlines() if (match := ROW.fullmatch(line))]


# ---- the table -------------------------------------------------------------


def test_what_the_start_took_adds_up(profiled: tuple[Done, Path]) -> None:
    done, _ = profiled
    start = done.err[done.err.index("until the first step") :].splitlines()
    last = next(place for place, line in enumerate(start) if line.startswith("  in all"))
    parts = {line[2:30].strip(): number(line[30:]) for line in start[1 : last + 1]}
    whole = parts.pop("in all")
    assert {
        "Python and imports",
        "tokenizer",
        "data",
        "planning",
        "binding",
        "kernels",
        "saving",
        "all else",
    } <= parts.keys()
    assert sum(parts.values()) == pytest.approx(whole, abs=0.001 * len(parts))
    assert all(seconds >= 0 for seconds in parts.values())


def test_what_a_step_took_adds_up(profiled: tuple[Done, Path]) -> None:
    done, _ = profiled
    found = rows(done.err)
    kernels = sum(number(row["ms"]) for row in found)
    waited, python = told(done.err, "waiting for data")[0], told(done.err, "Python, between kernels")[0]
    whole, share = told(done.err, "in all, of 5 steps")
    assert kernels + waited + python == pytest.approx(whole, abs=0.0006 * (len(found) + 2))
    assert sum(number(row["share"]) for row in found) < share == 100
    assert min(kernels, python) > 0


def test_the_ops_are_told_apart_by_what_they_are_for(profiled: tuple[Done, Path]) -> None:
    done, _ = profiled
    parts = {(row["op"], row["part"]): row for row in rows(done.err)}
    assert (
        parts["matmul", "forward"]["rate"].endswith("GFLOP/s")
        and number(parts["matmul", "forward"]["calls"]) == 14
    )
    assert ("matmul_nn", "backward") in parts and ("flash_attn_back", "backward") in parts
    assert parts["opt_step_adamw", "optimizer"]["rate"].endswith("GB/s")
    assert parts["sum_sqr", "optimizer"]["rate"].endswith("GB/s")
    assert parts["rms_norm", "again"] and parts["rms_norm", "forward"]  # what --remat light makes again


def test_of_an_adapter_as_well(tmp_path: Path) -> None:
    base = written(tmp_path / "base.gguf", small(), weights(small()))
    out = tmp_path / "run"
    done = ran("finetune", base, text_file(tmp_path), "--ctx", 16, *GROUPED, "--out", out, "--profile")
    assert {row["part"] for row in rows(done.err)} >= {"forward", "backward", "optimizer"}
    assert told(done.err, "files") and json.loads((out / "trace.json").read_text())["traceEvents"]


# ---- the trace -------------------------------------------------------------


def events(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return found


def test_the_trace_is_what_chrome_takes(profiled: tuple[Done, Path]) -> None:
    _, folder = profiled
    for event in events(folder):
        assert {"name", "ph", "pid", "tid"} <= event.keys() and event["ph"] in ("X", "M")
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["ts"] >= 0 and isinstance(event["cat"], str)


def test_what_is_within_a_step_lies_within_it(profiled: tuple[Done, Path]) -> None:
    _, folder = profiled
    spans = [event for event in events(folder) if event["ph"] == "X"]
    steps = [event for event in spans if event["cat"] == "step"]
    assert [event["name"] for event in steps] == [f"step {number}" for number in range(1, 6)]
    ops = [event for event in spans if event["cat"] in ("forward", "again", "backward", "optimizer")]
    first = steps[:3]
    for event in ops:
        assert any(
            s["ts"] - 1 <= event["ts"] and event["ts"] + event["dur"] <= s["ts"] + s["dur"] + 1 for s in first
        )
    assert len(ops) % 3 == 0 and ops
    assert all(one["ts"] + one["dur"] <= other["ts"] + 1 for one, other in pairwise(ops))


def test_the_trace_is_bounded_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamatrain.engine.profiler.MAX_OPS", 20)
    monkeypatch.setattr("llamatrain.engine.profiler.MAX_SPANS", 12)
    done = trained(tmp_path, "--profile")
    kinds = [event["cat"] for event in events(tmp_path / "run") if event["ph"] == "X"]
    assert (
        kinds.count("forward") + kinds.count("backward") + kinds.count("again") + kinds.count("optimizer")
        == 20
    )
    assert len(kinds) == 32
    assert "the first 20 ops of step 1, and the first steps as wholes" in done.err.splitlines()[-1]


# ---- and nothing else ------------------------------------------------------


def test_the_same_bits_come_out(profiled: tuple[Done, Path], tmp_path: Path) -> None:
    _, folder = profiled
    done = trained(tmp_path, "--threads", 2)
    assert timeless(folder) == timeless(tmp_path / "run")
    same_bits(folder / "model.gguf", tmp_path / "run" / "model.gguf")
    assert "until the first step" not in done.err and not (tmp_path / "run" / "trace.json").exists()


def test_a_run_that_is_gone_on_with(profiled: tuple[Done, Path], tmp_path: Path) -> None:
    _, folder = profiled
    out = tmp_path / "run"
    ran(
        "from-scratch",
        text_file(tmp_path),
        *NEW,
        "--iters",
        5,
        "--out",
        out,
        "--max-time",
        "0.001s",
        "--profile",
    )
    done = ran("from-scratch", "--resume", out, "--profile")
    same_bits(folder / "model.gguf", out / "model.gguf")
    assert "profile" not in (out / "config.toml").read_text()
    assert [event["name"] for event in events(out) if event.get("cat") == "step"] == [
        f"step {n}" for n in range(2, 6)
    ]
    assert told(done.err, "in all, of 4 steps")


def test_nothing_is_left_behind(profiled: tuple[Done, Path]) -> None:
    assert builtins.__import__.__module__ == "builtins"
    x = placeholder("x", (4, 4))
    program = Program.build([O.matmul(x, parameter("w", (4, 4)))])
    assert program.runs[0].__class__.__name__ == "CallTable"


# ---- where it cannot be as it should ---------------------------------------


def test_a_trace_that_cannot_be_written_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "run" / "trace.json").mkdir(parents=True)
    done = trained(tmp_path, "--profile")
    (line,) = [line for line in done.err.splitlines() if "trace.json" in line]
    assert line.startswith(f"warning: {tmp_path}/run/trace.json: ")
    assert rows(done.err) and (tmp_path / "run" / "model.gguf").exists()


def test_what_trains_nothing_takes_none(profiled: tuple[Done, Path], tmp_path: Path) -> None:
    _, folder = profiled
    done = run(
        "from-scratch", "--checkpoint-in", folder / "checkpoint-5.gguf", "--only-write-model", "--profile"
    )
    assert done.code == 2 and len(done.errors) == 1 and "--profile" in done.errors[0]


def test_a_signal_ends_it_with_table_and_trace(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with started(
        "from-scratch", text_file(tmp_path), *NEW, "--iters", 100_000, "--out", out, "--profile"
    ) as process:
        until(lambda: lines(out) > 3, process)
        process.send_signal(signal.SIGINT)
        done = finished(process)
    assert done.code == 130 and "resume with: llamatrain from-scratch --resume" in done.err
    assert rows(done.err) and len([event for event in events(out) if event.get("cat") == "step"]) >= 3
    assert "Traceback" not in done.err


def test_what_an_op_loads_is_of_its_step() -> None:
    recorder = Recorder(before=1.0)
    made = O.fill(shape=(2,), value=0.0)

    def loading() -> None:
        with recorder.phase("within"):
            pass

    assert made.node
    with recorder.phase("before"):
        (run,) = recorder.time_ops([(made.node, "backward", [loading])], create_device("reference"))
    run()
    phases, whole = recorder.startup_times()
    assert phases.keys() == {IMPORTS, "before"} and 1 <= sum(phases.values()) <= whole
    assert not recorder.between_steps and not recorder.ops[0].calls
    recorder.end_step(7, waited=99.0)
    assert recorder.steps == recorder.ops[0].calls == 1 and recorder.waited == 0
    assert recorder.seconds >= recorder.ops[0].seconds > 0 and recorder.traced_steps == [7]


def test_what_is_open_counts_until_now() -> None:
    recorder = Recorder()
    with recorder.phase("outer"), recorder.phase("inner"):
        phases, whole = recorder.startup_times()
    assert phases.keys() == {"outer", "inner"} and 0 < sum(phases.values()) <= whole
    assert next(line.split() for line in profile_table(recorder)) == ["until", "the", "end", "s"]
