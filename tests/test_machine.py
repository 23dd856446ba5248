"""The thread team, the compiler's cache and the processor's switches."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llamatrain.errors import UsageError
from llamatrain.machine import units
from llamatrain.machine.jit import Entry, i32
from llamatrain.machine.threads import Program


def count(lo, hi, thread, a):
    """Adds 1 to each item, and notes that it saw all of what the row before did."""
    items, before, faults = i32(a[0]), i32(a[1]), i32(a[2])
    for i in range(lo, hi):
        items[i] += 1
        if a[3] and before[a[4] - 1 - i] != a[3]:
            faults[0] += 1


COUNT = Entry(count)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("block", [1, 7, 1000])
def test_each_block_is_done_once_and_rows_wait_for_each_other(threads: int, block: int) -> None:
    items, rows = 1000, 40
    arrays = np.zeros((rows, items), np.int32)
    faults = np.zeros(1, np.int32)
    run = 1
    calls = [
        COUNT.call(arrays[row], arrays[max(0, row - 1)], faults, run if row else 0, items, items=items, block=block)
        for row in range(rows)
    ]
    Program(calls, threads)()
    assert (arrays == 1).all() and faults[0] == 0
    Program(calls[:1], threads)()
    assert (arrays[0] == 2).all()


def test_a_program_runs_again() -> None:
    array = np.zeros(100, np.int32)
    program = Program([COUNT.call(array, array, array, 0, 0, items=100, block=10)], 2)
    for _ in range(50):
        program()
    assert (array == 50).all()


def test_arrays_with_gaps_are_refused() -> None:
    with pytest.raises(ValueError, match="strides"):
        COUNT.call(np.zeros((4, 4), np.int32)[:, ::2], items=8, block=8)


def test_units_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(units.SWITCH, "avx512")
    assert not any(feature.startswith("+avx512") for feature in units.target()[1].split(","))
    monkeypatch.setenv(units.SWITCH, "avx1024")
    with pytest.raises(UsageError, match="avx1024"):
        units.switched_off()


def test_without_a_cache_folder_it_still_runs_and_says_so(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    script = "import tests.test_machine as t; t.test_a_program_runs_again()"
    environment = {**os.environ, "LLAMATRAIN_CACHE": str(blocked)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("compiling kernels for this machine, once (not kept: no cache folder can be written)") == 1
