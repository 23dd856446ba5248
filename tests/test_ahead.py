"""Compiling in other processes: the cache is full when the kernels are asked for, and failures cost nothing but time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import numpy as np
from llamatrain.engine.program import Program
from llamatrain.graph.ops import scale
from llamatrain.graph.tensor import placeholder
from llamatrain.machine import ahead, jit
if {broken}:
    ahead._run = lambda shares: None
x = placeholder("x", (64,))
program = Program.of([scale(x, by=2.0)], {{x: np.ones(64, np.float32)}})
program()
assert (program.read(x) == 1).all() and program.read(next(iter(program.plan.outputs))).sum() == 128
entries = [call.entry for run in program.runs for call in run.calls]
print(sum(entry.compiled.cache_hits for entry in entries), len(entries))
"""


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
