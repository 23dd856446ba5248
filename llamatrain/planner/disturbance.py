"""Measures how much other programs disturb a measurement.

The measure is how long this process's threads waited for a processor.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

TASKS = Path("/proc/self/task")


def total_wait() -> float:
    """Return the seconds that threads of this process were ready but did not run; only differences mean anything.

    Linux counts them per thread. Elsewhere it is the time that this thread did not run, which is right if it
    never sleeps.
    """
    total, known = 0, False
    with suppress(OSError):
        for task in TASKS.iterdir():
            with suppress(OSError, ValueError, IndexError):  # a thread may end meanwhile
                total += int((task / "schedstat").read_text().split()[1])
                known = True
    return total * 1e-9 if known else time.perf_counter() - time.thread_time()


def wait_share(work: Callable[[], None]) -> float:
    """Do some work; return the share of its time in which a thread waited."""
    before, start = total_wait(), time.perf_counter()
    work()
    took = time.perf_counter() - start
    return min(1.0, max(0.0, total_wait() - before) / max(took, 1e-9))
