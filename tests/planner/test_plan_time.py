"""`plan` says how long a run takes, and which ways to fit the memory it looked at."""

import json
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from llamatrain.compiler.cache import code_cache
from llamatrain.distributed.cores import count_cores
from llamatrain.graph.remat_policy import is_policy
from llamatrain.planner import limits, speeds
from llamatrain.planner import time as expected
from llamatrain.planner.speeds import OTHER_OPS, OpSpeeds
from llamatrain.run import fit_memory
from tests.helpers.cli import ROOT, TINY, ran, text_file
from tests.planner.test_plan_command import planned

DEEPER = (
    *TINY,
    "--embd",
    64,
    "--layer",
    5,
    "--ctx",
    128,
    "--batch",
    16,
    "--threads",
    1,
    "--precision",
    "f32",
)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured: an operation takes a billionth of a second, and nothing else any."""
    monkeypatch.setattr(
        expected, "get_speeds", lambda spec, measure: OpSpeeds({OTHER_OPS: (0.0, 1e-9)}, time.time() - 7300)
    )


@pytest.mark.usefixtures("known")
def test_the_time_of_a_step_and_of_the_run(tmp_path: Path) -> None:
    arguments = (text_file(tmp_path), *TINY, "--ctx", 32, "--batch", 4, "--threads", 1)
    plan = planned(*arguments, "--iters", 50)
    assert plan["seconds"] == pytest.approx(50 * plan["seconds_of_step"])
    assert plan["tokens_per_second"] == pytest.approx(4 * 32 / plan["seconds_of_step"])
    more = planned(*arguments, "--grad-acc", 3, "--iters", 50)
    assert more["seconds_of_step"] == pytest.approx(3 * plan["seconds_of_step"], rel=0.02)
    said = ran("plan", "from-scratch", *arguments, "--iters", 100_000).out
    assert re.search(
        r"\ntokens/s +[\d,]+  \S+ ms a step of 128\ntime +\d+:\d\d(:\d\d)?  for 100,000 steps, without valid",
        said,
    ), said
    assert "\nBased on a speed test 2 hours ago; --measure repeats it.\n" in said
    assert max(map(len, said.splitlines())) <= 100


@pytest.mark.usefixtures("known")
def test_what_is_not_known_is_not_foretold(tmp_path: Path) -> None:
    arguments = (text_file(tmp_path), *TINY)
    epochs = planned(*arguments, "--epochs", 2)
    assert epochs["seconds"] is None and epochs["seconds_of_step"] > 0
    assert "\ntime " not in ran("plan", "from-scratch", *arguments, "--epochs", 2).out
    lbfgs = (*arguments, "--optimizer", "lbfgs")
    assert planned(*lbfgs)["seconds_of_step"] is None
    assert re.search(
        r"\ntime +unknown  .*evaluations per step of LBFGS",
        ran("plan", "from-scratch", *lbfgs).out,
    )


@pytest.mark.usefixtures("known")
def test_what_is_left_of_a_run(tmp_path: Path) -> None:
    ran(
        "from-scratch",
        text_file(tmp_path),
        *TINY,
        "--ctx",
        32,
        "--iters",
        3,
        "--save-every",
        0,
        "--out",
        tmp_path / "run",
    )
    assert planned("--resume", tmp_path / "run", "--iters", 10)["seconds"] == pytest.approx(
        7 * planned("--resume", tmp_path / "run")["seconds_of_step"]
    )


def test_without_kernels_the_time_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled to find it out, and nothing kept."""
    monkeypatch.setenv("LLAMATRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(speeds, "find_missing", lambda needed: [*needed])
    monkeypatch.setattr(code_cache, "announce", None)
    arguments = (text_file(tmp_path), *TINY)
    said = ran("plan", "from-scratch", *arguments).out
    assert re.search(r"\ntime +unknown  known once a first run has compiled the kernels\n", said), said
    assert not [*tmp_path.rglob("speeds*")]


def test_it_is_measured_once_and_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For plain kernels, too."""
    monkeypatch.setattr(speeds, "wait_share", lambda work: (work(), 0.0)[1])
    monkeypatch.setattr(speeds, "SIZES", speeds.SIZES[3:])
    monkeypatch.setenv("LLAMATRAIN_CACHE", str(tmp_path / "cache"))
    start = time.thread_time()
    arguments = (text_file(tmp_path), *TINY, "--threads", 1, "--kernels", "reference")
    one = planned(*arguments)
    assert one["seconds_of_step"] > 0 and time.thread_time() - start < 6
    assert abs(one["speed_measured"] - time.time()) < 60 and one["speed_disturbed"] == 0
    found = speeds.measure_speeds
    monkeypatch.setattr(speeds, "measure_speeds", None)
    assert planned(*arguments)["seconds_of_step"] == one["seconds_of_step"]
    monkeypatch.setattr(speeds, "measure_speeds", found)
    assert planned(*arguments, "--measure")["speed_measured"] > one["speed_measured"]


def test_what_was_measured_on_a_busy_machine_is_not_kept_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said, and measured again ten minutes later."""
    busy = lambda work: (work(), 0.4)[1]
    monkeypatch.setattr(speeds, "SIZES", speeds.SIZES[4:])
    monkeypatch.setattr(speeds, "MAX_SECONDS", 0.05)
    monkeypatch.setattr(speeds, "wait_share", busy)
    monkeypatch.setenv("LLAMATRAIN_CACHE", str(tmp_path / "cache"))
    arguments = (text_file(tmp_path), *TINY, "--threads", 1, "--kernels", "reference")
    said = ran("plan", "from-scratch", *arguments).out
    assert "(threads waited 40% of the time)" in said and "ten minutes" in said
    monkeypatch.setattr(speeds, "wait_share", lambda work: (work(), 0.0)[1])
    assert planned(*arguments)["speed_disturbed"] == pytest.approx(0.4)
    later = time.time() + speeds.BUSY_LIFETIME
    monkeypatch.setattr(speeds.time, "time", lambda: later)
    assert planned(*arguments)["speed_disturbed"] == 0 and len([*(tmp_path / "cache").rglob("speeds-*")]) == 1


def test_runs_that_were_disturbed_do_not_count_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.planner.test_plan_ranks import TRAINED

    shares = iter([0.5, 0.0] * 10_000)
    monkeypatch.setattr(speeds, "wait_share", lambda work: (work(), next(shares))[1])
    found = speeds.time_model(speeds.small_spec(TRAINED, None, speeds.SIZES[4]))
    assert found.wait_share == 0 and all(each.seconds > 0 for each in found.ops)


def test_a_busy_machine_is_not_measured_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disturbed runs of all models together take so long, and no longer: it was a second for each model."""
    from tests.planner.test_plan_ranks import TRAINED

    took = list[float]()

    def busy(work: Callable[[], None]) -> float:
        start = time.perf_counter()
        work()
        took.append(time.perf_counter() - start)
        return 0.4

    monkeypatch.setattr(speeds, "wait_share", busy)
    found = speeds.measure_speeds(TRAINED, None)
    assert found and found.disturbed == pytest.approx(0.4)
    assert sum(took) < speeds.MAX_DISTURBED_SECONDS + len(speeds.SIZES) * (speeds.MIN_SECONDS + max(took))


@pytest.mark.skipif(not speeds.TASKS.exists(), reason="only Linux counts what threads wait")
def test_waiting_for_a_processor_is_seen() -> None:
    """With more programs at work than there are processors."""
    burning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * count_cores())]
    try:
        time.sleep(0.3)
        shares = [speeds.wait_share(burn) for _ in range(5)]
    finally:
        for each in burning:
            each.kill()
            each.wait()
    assert max(shares) > speeds.QUIET_SHARE


def burn() -> None:
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        pass


@pytest.mark.usefixtures("known")
def test_the_ways_that_were_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is faster than what is taken takes more than there is; all that is said is in the JSON."""
    for place in (fit_memory, limits):  # this process holds more and more
        monkeypatch.setattr(place, "resident_bytes", lambda: 10**8)
    data = text_file(tmp_path)
    light, block = (planned(data, *DEEPER, "--remat", how)["total"] for how in ("light", "block"))
    assert not planned(data, *DEEPER, "--memory", f"{light // 10**6 + 20}MB")["tried"]
    limit = (light + 2 * block) // 3 // 10**6 * 10**6
    plan = planned(data, *DEEPER, "--memory", limit)
    tried, taken = plan["tried"], plan["tried"][-1]
    assert len(tried) > 1 and taken["cost"] == 1 and taken["total"] == plan["total"] <= limit
    assert (taken["remat"], taken["splits"]) == (plan["remat"], plan["splits"])
    assert all(each["total"] > limit for each in tried if each["cost"] < 1)
    lines = ran("plan", "from-scratch", data, *DEEPER, "--memory", limit).out.split("\n\n")[-1].splitlines()
    assert lines[0].split()[:3] == ["recomputing", "parts", "memory"] and len(lines) == 1 + len(tried)
    assert sum(line.endswith("  chosen") for line in lines) == 1 and max(map(len, lines)) <= 100
    run = ran("from-scratch", data, *DEEPER, "--memory", limit, "--iters", 1, "--out", tmp_path / "run")
    kept = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert is_policy(kept["remat"]) and kept["batch"] * kept["grad-acc"] == 16
    again = ran("from-scratch", "--resume", tmp_path / "run", "--iters", 2)
    for said in (run, again):
        assert kept["remat"] == "none" or f"recomputing {kept['remat']}" in " ".join(said.err.split())


def test_a_way_that_is_written_is_taken(tmp_path: Path) -> None:
    arguments = (text_file(tmp_path), *TINY, "--layer", 4, "--iters", 2)
    done = ran("from-scratch", *arguments, "--remat", "segment:2,wide:1", "--out", tmp_path / "run")
    assert "recomputing segment:2,wide:1" in " ".join(done.err.split())
    assert 'remat = "segment:2,wide:1"' in (tmp_path / "run" / "config.toml").read_text()
    ran("from-scratch", *arguments, "--out", tmp_path / "plain")
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
    assert "recomputing segment:2,wide:1" in " ".join(
        ran("from-scratch", "--resume", tmp_path / "run", "--iters", 3).err.split()
    )


def losses(run: Path) -> list[float]:
    return [
        json.loads(line)["loss"]
        for line in (run / "metrics.jsonl").read_text().splitlines()
        if '"loss"' in line
    ]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_steps_take_what_was_foretold(precision: str, tmp_path: Path) -> None:
    """Within a quarter, of shapes that nothing was measured of; by one thread's own time, as others may be at work."""
    words = ("--cpu", "--rounds", "2", "--folder", str(tmp_path), precision)
    done = subprocess.run(
        [sys.executable, "scripts/time_cases.py", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.endswith("\n0 bad\n") and done.stdout.count("%") == 14, (
        done.stdout + done.stderr
    )
