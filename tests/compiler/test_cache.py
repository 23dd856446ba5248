"""The thread team, the compiler's cache and the processor's switches."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from llamatrain.compiler.cache import code_cache
from llamatrain.compiler.declare import I32, KernelEntry, Real, i32
from llamatrain.compiler.thread_pool import CallTable
from llamatrain.errors import UsageError
from llamatrain.platform import cpu
from tests.helpers.warm_cache import without_libraries


def count(lo, hi, thread, items: I32, before: I32, faults: I32, run, size):
    """Adds 1 to each item, and notes that it saw all of what the row before did."""
    for i in range(lo, hi):
        items[i] += 1
        if run and before[size - 1 - i] != run:
            faults[0] += 1


COUNT = KernelEntry(count)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("block", [1, 7, 1000])
def test_each_block_is_done_once_and_rows_wait_for_each_other(threads: int, block: int) -> None:
    items, rows = 1000, 40
    arrays = np.zeros((rows, items), np.int32)
    faults = np.zeros(1, np.int32)
    run = 1
    calls = [
        COUNT.call(
            arrays[row], arrays[max(0, row - 1)], faults, run if row else 0, items, items=items, block=block
        )
        for row in range(rows)
    ]
    CallTable(calls, threads)()
    assert (arrays == 1).all() and faults[0] == 0
    CallTable(calls[:1], threads)()
    assert (arrays[0] == 2).all()


def test_a_program_runs_again() -> None:
    array = np.zeros(100, np.int32)
    program = CallTable([COUNT.call(array, array, array, 0, 0, items=100, block=10)], 2)
    for _ in range(50):
        program()
    assert (array == 50).all()


class Pair(NamedTuple):
    first: I32
    count: int


@KernelEntry
def spread(lo, hi, thread, out: I32, pair: Pair, factor: Real, *rest):
    out[0], out[1], out[2], out[3] = pair.first[0], pair.count, int(factor * 2), i32(rest[1])[0]


def test_arguments_have_names_and_are_checked() -> None:
    out, one = np.zeros(4, np.int32), np.full(1, 7, np.int32)
    CallTable([spread.call(out, Pair(one, 3), 2.5, 0, one + 1, items=1, block=1)], 1)()
    assert out.tolist() == [7, 3, 5, 8]
    again = COUNT.call(out, out, size=1, run=0, faults=out, items=1, block=1)
    assert (again.words == COUNT.call(out, out, out, 0, 1, items=1, block=1).words).all()
    for args, named in (((out,), {}), ((out, out, out, 0, 1, 2), {}), ((out, out, out, 0), {"width": 1})):
        with pytest.raises(TypeError, match="count: "):
            COUNT.call(*args, **named, items=1, block=1)
    with pytest.raises(TypeError, match="where an integer or an array belongs"):
        COUNT.call(out, out, out, 0.5, 1, items=1, block=1)


def test_arrays_with_gaps_are_refused() -> None:
    array = np.zeros((4, 4), np.int32)[:, ::2]
    with pytest.raises(ValueError, match="strides"):
        COUNT.call(array, array, array, 0, 0, items=8, block=8)


def test_units_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu.DISABLE_VARIABLE, "avx512,avxvnni")
    script = "from llamatrain.platform import cpu; print(sorted(cpu.enabled_units()), cpu.processor().units)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "frozenset()"]
    monkeypatch.setenv(cpu.DISABLE_VARIABLE, "avx1024")
    with pytest.raises(UsageError, match="avx1024"):
        cpu.disabled_units()


@pytest.mark.skipif("avx512" not in cpu.enabled_units(), reason="this is a smaller processor")
@pytest.mark.parametrize("without", ["", "avx512"])
def test_code_is_for_the_processor_that_is_left(without: str, tmp_path: Path) -> None:
    script = """
from llamatrain.kernels.cpu.elementwise import combine
from llamatrain.compiler import emit
target = emit.numba_context().codegen()._tm
emit.numba_context().codegen().emit_object = lambda module: target.emit_assembly(module).encode()
print(emit.emit_object(combine).decode())
"""
    environment = {**os.environ, cpu.DISABLE_VARIABLE: without}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    assert ("%zmm" in done.stdout) == ("%k1" in done.stdout) == (not without)


def test_without_a_cache_folder_it_still_runs_and_says_so(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    script = "import tests.compiler.test_cache as t\nfrom llamatrain.compiler import parallel; from llamatrain.platform import terminal\n"
    script += "parallel.list_compilables = list\n"  # what is not needed here is not compiled with it, which takes half a minute
    script += "with terminal.show_log(): t.test_a_program_runs_again()"
    environment = without_libraries(blocked, TMPDIR=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    first = done.stderr.splitlines()[0]
    assert first.startswith("compiling kernels for this machine, once (kept in "), done.stderr
    assert f", since {blocked}/llamatrain/" in first
    assert first.endswith(" cannot be written (Not a directory); LLAMATRAIN_CACHE names another folder)")
    assert done.stderr.count("compiling kernels for this machine, once") == 1
    spare = tmp_path / f"llamatrain-{os.geteuid()}"
    assert sorted(tmp_path.iterdir()) == [blocked, spare] and spare.stat().st_mode & 0o777 == 0o700
    again = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    assert "compiling" not in again.stderr  # short runs took minutes, each of them
    spare.chmod(0o755)  # anybody could have made it
    third = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    assert third.stderr.startswith(f"compiling kernels for this run alone: {blocked}/llamatrain/")


def test_a_body_that_cannot_be_compiled_is_no_fault_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.core.errors import NumbaError

    said: list[str] = []
    monkeypatch.setattr(code_cache, "log", said.append)
    with pytest.raises(NumbaError):
        _ = KernelEntry(wrong).address
    assert all(line.startswith("compiling") for line in said)


def wrong(lo, hi, thread, items: I32):
    items.nothing_of_this_name()


def test_nothing_that_is_compiled_elsewhere_brings_the_compiler() -> None:
    script = """
import sys
from importlib import import_module
sys.path.insert(0, "scripts")
from build_kernels import list_compilables
assert len(list_compilables()) > 60
import llamatrain.cli.main
assert not {"numba", "llvmlite"} & {*sys.modules}, sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])
