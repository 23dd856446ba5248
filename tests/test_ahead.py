"""Compiling in other processes: the cache is full when the kernels are asked for, and failures cost nothing but time."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

SCRIPT = """
import numpy as np
from llamatrain.engine.program import Program
from llamatrain.graph.ops import scale
from llamatrain.graph.tensor import placeholder
from llamatrain.machine import ahead, jit, terminal
if {broken}:
    ahead._run = lambda shares: None
x = placeholder("x", (64,))
with terminal.shown():
    program = Program.of([scale(x, by=2.0)], {{x: np.ones(64, np.float32)}})
    program()
assert (program.read(x) == 1).all() and program.read(next(iter(program.plan.outputs))).sum() == 128
entries = [call.entry for run in program.runs for call in run.calls]
print(sum(entry.compiled.cache_hits for entry in entries), len(entries))
"""

MULTIPLYING = """
import numpy as np
from llamatrain.engine.program import Program
from llamatrain.graph.ops import matmul
from llamatrain.graph.tensor import placeholder
x, w = placeholder("x", (4, 3)), placeholder("w", (2, 3))
y = matmul(x, w)
program = Program.of([y], {x: np.full((4, 3), 2, np.float32), w: np.ones((2, 3), np.float32)})
program()
entries = [call.entry for run in program.runs for call in run.calls]
print(program.read(y).sum(), sum(entry.compiled.cache_hits for entry in entries), len(entries))
"""
T = TypeVar("T")


@pytest.mark.parametrize("broken", [False, True])
def test_kernels_come_from_the_cache_that_others_filled(tmp_path: Path, broken: bool) -> None:
    env = {**os.environ, "LLAMATRAIN_CACHE": str(tmp_path)}
    words = [sys.executable, "-c", SCRIPT.format(broken=broken)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    hits, entries = map(int, done.stdout.split())
    assert entries > 0 and hits == (0 if broken else entries)
    assert done.stderr.count("compiling kernels for this machine, once") == 1
    assert "kernels in" in done.stderr
    again = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    assert again.stdout.split() == [str(entries)] * 2 and not again.stderr


def test_what_cannot_be_kept_is_compiled_once_for_the_run_without_assertions_too(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    env = {**os.environ, "LLAMATRAIN_CACHE": str(blocked), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-O", "-c", MULTIPLYING], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["48.0", "2", "2"], done.stderr  # both come from what the others compiled
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found by /proc")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_who_compiles_ends_with_who_asked(tmp_path: Path, how: signal.Signals) -> None:
    env = {**os.environ, "LLAMATRAIN_CACHE": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", MULTIPLYING], env=env, stderr=subprocess.DEVNULL) as process:
        children = soon(lambda: children_of(process.pid))
        process.send_signal(how)
    assert children and soon(lambda: not any(map(alive, children)))


def soon(found: Callable[[], T], patience: float = 20.0) -> T:
    end = time.monotonic() + patience
    while not (result := found()) and time.monotonic() < end:
        time.sleep(0.02)
    return result


def children_of(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(path.parent.name))
    return found


def alive(process: int) -> bool:
    """Not ended, nor ended and not yet buried by whoever buries orphans."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
