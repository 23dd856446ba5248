"""The team of threads: many tables at once, forks, signals, the end of the program; and that it sleeps when there is no work."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from llamatrain.compiler import thread_pool
from llamatrain.compiler.declare import I32, KernelEntry
from llamatrain.compiler.thread_pool import (
    INSIDE,
    OPEN,
    CallTable,
    ThreadPool,
    align_to_line,
    fetch_add,
    load,
    pause_spinning,
)
from llamatrain.run.signals import SAME_SIGNAL
from tests.compiler.test_cache import COUNT
from tests.helpers.cli import PROGRAM, ROOT, TINY, environment, text_file


@KernelEntry
def until(lo, hi, thread, word, inside):
    """Goes on until a word says so, and counts who has come."""
    fetch_add(inside, 1)
    while not load(word):
        pause_spinning()


@KernelEntry
def who(lo, hi, thread, seen: I32, inside, all_of_them):
    """Each thread notes itself, and waits for the others: a block for each, and none does two."""
    seen[thread] += 1
    fetch_add(inside, 1)
    while load(inside) < all_of_them:
        pause_spinning()


def held(blocks: int, count: int = 0) -> tuple[CallTable, np.ndarray]:
    """A table of so many blocks that ends when its first word is set; the second counts those that were begun."""
    words = np.zeros(2, np.int64)
    at = words.ctypes.data
    return CallTable([until.call(at, at + 8, items=blocks, block=1)], count or blocks), words


@KernelEntry
def note_thread(lo, hi, thread, seen: I32):
    """Each thread counts its blocks, which take a moment."""
    seen[thread] += 1
    for _ in range(20):
        pause_spinning()


def test_helpers_of_a_larger_table_stay_out_of_a_smaller_one() -> None:
    """They still look for work when it opens, but its kernels have no scratch memory for them."""
    larger, smaller = np.zeros(3, np.int32), np.zeros(3, np.int32)
    three = CallTable([note_thread.call(larger, items=64, block=1)], 3)
    two = CallTable([note_thread.call(smaller, items=64, block=1)], 2)
    for _ in range(300):
        three()
        two()
    assert larger.sum() == smaller.sum() == 300 * 64
    assert smaller[2] == 0


@contextmanager
def at_work(table: CallTable, words: np.ndarray) -> Iterator[np.ndarray]:
    """While this is open, two or more are in the table."""
    worker = threading.Thread(target=table)
    worker.start()
    until_then = time.monotonic() + 10
    try:
        while words[1] < 2:
            assert time.monotonic() < until_then
        yield words
    finally:
        words[0] = 1
        worker.join(10)


def counting(rows: int, count: int, items: int = 300) -> tuple[CallTable, np.ndarray, np.ndarray]:
    arrays, faults = np.zeros((rows, items), np.int32), np.zeros(1, np.int32)
    calls = [
        COUNT.call(
            arrays[row],
            arrays[max(0, row - 1)],
            faults,
            1 if row else 0,
            items,
            items=items,
            block=1 + row % 40,
        )
        for row in range(rows)
    ]
    return CallTable(calls, count), arrays, faults


def is_right(rows: int, count: int) -> bool:
    table, arrays, faults = counting(rows, count)
    table()
    return bool((arrays == 1).all() and not faults[0])


def word(team: ThreadPool, at: int) -> int:
    return int(team.words[align_to_line(team.words)[1] + at // 8])


@pytest.fixture
def team(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadPool]:
    """One of this test's own."""
    made = ThreadPool()
    monkeypatch.setattr(thread_pool, "pool", made)
    yield made
    assert not word(made, INSIDE) and not word(made, OPEN) and not made.lock.locked()


# ---- who helps -------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 7])
def test_each_thread_has_a_number_of_its_own(count: int, team: ThreadPool) -> None:
    """More of them than processors, too."""
    for _ in range(3):
        seen, inside = np.zeros(count, np.int32), np.zeros(1, np.int64)
        CallTable([who.call(seen, inside.ctypes.data, count, items=count, block=1)], count)()
        assert (seen == 1).all()
    assert len(team.wake_locks) == count - 1


def test_threads_keep_what_they_look_at() -> None:
    """A team that is gone left helpers behind who looked into memory that another team had by then."""
    made = ThreadPool()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thread_pool, "pool", made)
        assert is_right(3, 2)
    words = weakref.ref(made.words)
    del made
    gc.collect()
    assert words() is not None


def test_no_more_help_than_was_asked_for(team: ThreadPool) -> None:
    """Though others were hired before; who was late for that table, on a machine that is busy, is not the next time."""
    assert is_right(3, 6) and len(team.wake_locks) == 5
    begun = list[int]()
    while 2 not in begun and len(begun) < 20:
        with at_work(*held(6, 2)) as words:
            time.sleep(0.03)
            begun.append(int(words[1]))
    assert 2 in begun, begun


def test_one_table_at_a_time_has_the_team(team: ThreadPool) -> None:
    """Another waits; what needs no team does not."""
    table, arrays, faults = counting(5, 2)
    waiting = threading.Thread(target=table)
    with at_work(*held(2)):
        waiting.start()
        time.sleep(0.03)
        assert not arrays.any() and is_right(5, 1)
    waiting.join(10)
    assert (arrays == 1).all() and not faults[0]


def test_a_row_of_one_block_wakes_nobody(team: ThreadPool, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.zeros(100, np.int32)
    table = CallTable([COUNT.call(array, array, array, 0, 0, items=100, block=100)] * 5, 8)
    table()
    assert table.threads == 1 and not team.wake_locks and (array == 5).all()
    empty = CallTable([COUNT.call(array, array, array, 0, 0, items=0, block=8)], 8)
    empty()
    assert not team.wake_locks and (array == 5).all()


def test_tables_of_ever_other_numbers_of_threads(team: ThreadPool) -> None:
    tables = [counting(1 + at % 7, 1 + at % 5, items=60) for at in range(40)]
    for turn in range(10):
        for table, arrays, faults in tables:
            table()
            assert (arrays == turn + 1).all()
            faults[:] = 0  # of rows that see more than one turn
    assert len(team.wake_locks) == 4


def test_many_threads_of_python_run_tables_at_once(team: ThreadPool) -> None:
    wrong = list[int]()

    def work(count: int) -> None:
        wrong.extend(count for _ in range(40) if not is_right(5, count))

    workers = [threading.Thread(target=work, args=[1 + at % 4]) for at in range(6)]
    for each in workers:
        each.start()
    for each in workers:
        each.join(30)
    assert not wrong and not any(each.is_alive() for each in workers)


def test_where_no_more_threads_can_be_had_those_that_are_there_do_it(
    team: ThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_right(4, 2)

    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert is_right(4, 5) and len(team.wake_locks) == 1
    monkeypatch.undo()
    monkeypatch.setattr(thread_pool, "pool", team)
    assert is_right(4, 3) and len(team.wake_locks) == 2


# ---- sleep -----------------------------------------------------------------


def test_nobody_spins_between_runs(team: ThreadPool) -> None:
    assert is_right(50, 4)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - before < 0.1


class Interrupting:
    """A lock at which an interrupt comes in."""

    def locked(self) -> bool:
        raise KeyboardInterrupt


def test_an_interrupt_on_the_way_in_leaves_nobody_in_the_table(team: ThreadPool) -> None:
    """Whose memory is another's by the time that somebody looks for work in it."""
    assert is_right(4, 3)
    first, second = team.wake_locks
    table, arrays, _ = counting(4, 3)
    team.wake_locks[1] = Interrupting()  # type: ignore[call-overload]
    with pytest.raises(KeyboardInterrupt):
        table()
    assert not word(team, OPEN) and not word(team, INSIDE)
    team.wake_locks[:] = first, second
    del table, arrays
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before < 0.1
    assert all(is_right(4, 3) for _ in range(20))


# ---- forks -----------------------------------------------------------------

FORKING = """
import os, threading
from llamatrain.compiler import thread_pool
from tests.compiler.test_thread_pool import counting, held, is_right
stop = []
assert is_right(2, 2)  # what is looked up once is there
def busy():
    while not stop:
        assert is_right(6, 3)
worker = threading.Thread(target=busy, daemon=True)
worker.start()
for at in range(12):
    if not (child := os.fork()):
        assert not thread_pool.pool.wake_locks
        fine = all(is_right(6, 3) for _ in range(5)) and len(thread_pool.pool.wake_locks) == 2
        if not (grandchild := os.fork()):
            os._exit(not (not thread_pool.pool.wake_locks and is_right(6, 2)))
        os._exit(not fine or os.waitpid(grandchild, 0)[1])
    assert os.waitpid(child, 0)[1] == 0 and is_right(6, 3), at
stop.append(1)
worker.join()
table, words = held(2)  # and with a run that is at its very heart
inside = threading.Thread(target=table, daemon=True)
inside.start()
while words[1] < 2:
    pass
if not (child := os.fork()):
    os._exit(not is_right(6, 3))
assert os.waitpid(child, 0)[1] == 0
words[0] = 1
inside.join()
print("well")
"""


def ended(script: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-W", "ignore::DeprecationWarning", "-X", "faulthandler", "-c", script]
    env = environment()
    return subprocess.run(
        words, env=env, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_parent_and_child_go_on_after_a_fork_in_the_middle() -> None:
    is_right(2, 2)  # so that all is compiled
    done = ended(FORKING)
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr


# ---- the end of the program ------------------------------------------------

ENDING = """
import atexit, sys, threading
from llamatrain.compiler import thread_pool
from tests.compiler.test_thread_pool import held, is_right
assert is_right(6, 3) and len(thread_pool.pool.wake_locks) == 2
if {running}:
    table, words = held(3)
    threading.Thread(target=table, daemon=True).start()
    while words[1] < 3:
        pass
    del table, words
else:
    atexit.register(lambda: print(is_right(6, 3), flush=True))  # when Python begins no more threads
print("end", flush=True)
"""


@pytest.mark.parametrize("running", [False, True])
def test_the_program_ends_whoever_sleeps_or_works(running: bool) -> None:
    held(2)
    done = ended(ENDING.format(running=running))
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n" if running else "end\nTrue\n", "")


HELD = """
import os, sys
sys.path.insert(0, {root!r})
from tests.compiler.test_thread_pool import held
from llamatrain.engine.program import Program
def stuck(self):
    table, words = held(2)
    os.write(1, b".")
    table()
Program.__call__ = stuck
"""


@pytest.mark.skipif(os.name == "nt", reason="signals are others there")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_middle_of_a_step_ends_the_run_at_once(
    number: int, code: int, tmp_path: Path
) -> None:
    """A step that would go on for ever, with all threads in it: the first would have it saved behind that, the second has not."""
    held(2)
    data, script = text_file(tmp_path, 1500), PROGRAM[-1]
    words = [
        sys.executable,
        "-c",
        HELD.format(root=str(ROOT)) + script,
        "from-scratch",
        str(data),
        *map(str, TINY),
        "--ctx",
        "32",
    ]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
    with subprocess.Popen([*words, "--out", "run"], env=environment(), **streams) as process:  # type: ignore[call-overload]
        try:
            assert process.stdout.read(1) == ".", process.stderr.read()
            process.send_signal(number)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1.5 * SAME_SIGNAL)
            process.send_signal(number)
            _, err = process.communicate(timeout=5)
        finally:
            process.kill()
    assert process.returncode == code and "Traceback" not in err and "Interrupt" not in err, err
