"""Processors that threads may run on. Only Linux names them, and lets threads be moved."""

import ctypes
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache


def usable_cpus() -> set[int]:
    """Return the numbers of the processors that this process may use."""
    if sys.platform == "linux":
        return os.sched_getaffinity(0)
    else:
        return set(range(os.cpu_count() or 1))


def move_threads(thread_ids: Iterable[int], cpus: set[int]) -> None:
    """Let threads run on these processors only."""
    if sys.platform == "linux" and cpus:
        with suppress(OSError):
            for thread_id in thread_ids:
                os.sched_setaffinity(thread_id, cpus)


@cache
def _getcpu() -> Callable[[], int] | None:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return getattr(libc, "sched_getcpu", None)


def current_cpu() -> int:
    """Return the processor that this thread runs on; -1 if unknown."""
    function = _getcpu()
    return function() if function else -1
