"""Compiling in other processes: the cache is full when the kernels are asked for, and failures cost nothing but time."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from tests.helpers.cli import ROOT
from tests.helpers.warm_cache import warm, without_libraries

SCRIPT = """
import numpy as np
from llamatrain.engine.program import Program
from llamatrain.graph.ops import scale
from llamatrain.graph.tensor import placeholder
from llamatrain.compiler import parallel; from llamatrain.platform import terminal
from llamatrain.compiler.cache import code_cache
if {broken}:
    parallel._run_workers = lambda names, workers: 0
here, make = [], code_cache.compile
code_cache.compile = lambda declared: here.append(declared) or make(declared)
x = placeholder("x", (64,))
with terminal.show_log():
    program = Program.build([scale(x, by=2.0)], {{x: np.ones(64, np.float32)}})
    program()
assert (program.read(x) == 1).all() and program.read(next(iter(program.plan.outputs))).sum() == 128
entries = [call.entry for run in program.runs for call in run.calls]
print(sum(entry not in here for entry in entries), len(entries))
"""

MULTIPLYING = """
import numpy as np
from llamatrain.engine.program import Program
from llamatrain.graph.ops import matmul
from llamatrain.graph.tensor import placeholder
x, w = placeholder("x", (4, 3)), placeholder("w", (2, 3))
Program.build([matmul(x, w)], {x: np.full((4, 3), 2, np.float32), w: np.ones((2, 3), np.float32)})()
"""

STEPPING = """
from tests.helpers.llama_step import LlamaStep
from tests.helpers.random_models import TINY
LlamaStep(TINY)()
"""

UNKEPT = """
from llamatrain.compiler import parallel, thread_pool
from llamatrain.compiler.cache import code_cache
said = []
code_cache.log = said.append
for _ in range(2):
    parallel.precompile([thread_pool.run_table])
    code_cache.report()
thread_pool.run_table.address
print(len(said), *code_cache.store.in_memory)
"""

RENDERING = """
from llamatrain.data.chat.template import ChatTemplate
work = "{% for i in range(99999) %}{{ (m.content * 30) | upper | length }}{% endfor %}"
with ChatTemplate("{% for m in messages %}{% if m.content | length > 99999 %}" + work + "{% endif %}{% endfor %}") as it:
    it.render([{"role": "user", "content": "x" * 100000}])
"""  # a small chat takes no time, and one of this length may take five seconds

LONE = """
import sys
import numpy as np
from llamatrain.compiler import parallel
parallel.list_compilables = list
from llamatrain.data.tokenizer.bpe_merge import word_keys
word_keys(np.frombuffer(b"abc", np.uint8), np.array([3]), keys := np.zeros(1, np.int64))
assert keys[0] and "numba" not in sys.modules
"""

ALONE = "llamatrain.compiler.thread_pool.run_table"
T = TypeVar("T")


ALL = """
from llamatrain.compiler import parallel, thread_pool; from llamatrain.platform import terminal
from llamatrain.compiler.cache import code_cache
from llamatrain.compiler.inventory import list_compilables
parallel._run_workers = lambda names, workers: print(len(names), len(list_compilables())) or 0
with terminal.show_log():
    parallel.precompile([thread_pool.run_table])
"""


def test_the_first_that_needs_one_kernel_has_all_compiled(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALL],
        env=without_libraries(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    asked, every = map(int, done.stdout.split())
    assert asked == every > 60 and done.stderr.count("compiling kernels for this machine, once") == 1


def test_what_cannot_be_kept_is_compiled_where_it_is_needed_alone(tmp_path: Path) -> None:
    (blocked := tmp_path / "file").write_text("no folder")
    (tmp_path / f"llamatrain-{os.geteuid()}").write_text("no folder")  # nor can the one that stands in for it
    env = without_libraries(blocked, TMPDIR=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", ALL], env=env, capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[0]) < 10, done.stderr


@pytest.mark.parametrize("broken", [False, True])
def test_kernels_come_from_the_cache_that_others_filled(tmp_path: Path, broken: bool) -> None:
    warm(tmp_path, ALONE, "llamatrain.kernels.cpu.elementwise.")
    env = without_libraries(tmp_path)
    words = [sys.executable, "-c", SCRIPT.format(broken=broken)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    hits, entries = map(int, done.stdout.split())
    assert entries > 0 and hits == (0 if broken else entries)
    assert done.stderr.count("compiling kernels for this machine, once") == 1
    assert re.search(r"compiled \d+ kernels? in ", done.stderr)
    again = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    assert again.stdout.split() == [str(entries)] * 2 and not again.stderr


def test_a_function_that_is_called_brings_no_compiler_into_the_process(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LONE], env=without_libraries(tmp_path), check=True)
    assert [path.name.partition("-")[0] for path in tmp_path.rglob("*-*")] == [
        "llamatrain.data.tokenizer.bpe_merge.word_keys"
    ]


def test_what_cannot_be_kept_is_compiled_once_for_the_run_without_assertions_too(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    spare = tmp_path / f"llamatrain-{os.geteuid()}"  # which may not be used, either
    spare.write_text("no folder")
    env = without_libraries(blocked, TMPDIR=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-O", "-c", UNKEPT], env=env, capture_output=True, text=True, check=True
    )
    said, name = done.stdout.split()  # one line that nothing is kept, and one of what was compiled
    assert said == "2" and name.startswith(ALONE), done.stderr
    assert sorted(tmp_path.iterdir()) == [blocked, spare]


def test_a_compiler_that_ends_costs_no_kernel_but_its_own(tmp_path: Path) -> None:
    names = [
        "llamatrain.compiler.thread_pool:nothing_of_this_name",
        "llamatrain.compiler.thread_pool:run_table",
    ]
    script = f"from llamatrain.compiler import parallel; print(parallel._run_workers({names!r}, 2), parallel._run_workers({names!r}, 1))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=without_libraries(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["1", "0"]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found by /proc")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_who_compiles_ends_with_who_asked(tmp_path: Path, how: signal.Signals) -> None:
    """In the middle of its work, too, much of which is no Python, and enough for a fast machine."""
    env = without_libraries(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", STEPPING], env=env, cwd=ROOT, stderr=subprocess.DEVNULL
    ) as process:
        children = soon(lambda: children_of(process.pid))
        busy = how != signal.SIGKILL or soon(lambda: any(seconds_of(child) > 2.5 for child in children), 60)
        process.send_signal(how)
    assert children and busy and soon(lambda: not any(map(alive, children)), 5)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found by /proc")
def test_who_renders_ends_with_who_asked_in_the_middle_of_a_c_function() -> None:
    with subprocess.Popen([sys.executable, "-c", RENDERING], stderr=subprocess.DEVNULL) as process:
        (child,) = children = soon(lambda: children_of(process.pid))
        busy = soon(lambda: seconds_of(child) > 1)
        process.kill()
    assert busy and soon(lambda: not any(map(alive, children)), 1)


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


def seconds_of(process: int) -> float:
    """Of the processor's, as long as it lives."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def alive(process: int) -> bool:
    """Not ended, nor ended and not yet buried by whoever buries orphans."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
