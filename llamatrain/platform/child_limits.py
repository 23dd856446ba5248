"""Limits that a child process sets on itself, and its end with its parent. On Windows the parent does both.

The child imports little else, because its memory is limited.
"""

import os
import signal
import sys

if sys.platform != "win32":
    import fcntl
    import resource

HAS_TIMER = sys.platform != "win32"  # of the CPU time of a process, by itself


def limit_memory(size: int) -> None:
    """Limit the address space of this process, and forbid it to write files."""
    if sys.platform != "win32":
        if sys.platform != "darwin":  # macOS refuses this limit: the parent's limit of time remains
            resource.setrlimit(resource.RLIMIT_AS, (size, size))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def exit_with_parent(pipe: int) -> None:
    """Let a signal end this process, even within a C function, when the parent closes its end of the pipe.

    Nothing is ever written to the pipe. A thread would wait for the end of a C function.
    """
    if sys.platform != "win32":
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def set_timer(seconds: float) -> float:
    """Start the timer that ends this process, or stop it with 0; return the CPU seconds that were left."""
    if sys.platform == "win32":
        return seconds
    else:
        return signal.setitimer(signal.ITIMER_PROF, seconds)[0]
