"""Processes: a child's pipe, its limits on Windows, and the age of this process.

On Unix a child limits itself (`child_limits`). On Windows its parent puts it into a job, which the system ends
with the parent.
"""

import ctypes
import os
import selectors
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

if sys.platform == "win32":
    import msvcrt

POLL_SECONDS = 0.002  # between two looks into a pipe on Windows, which cannot wait for one with a time limit
LIMIT_PROCESS_MEMORY, KILL_ON_JOB_CLOSE = 0x100, 0x2000
EXTENDED_LIMITS = 9  # the number of the structure below


class JobLimits(ctypes.Structure):
    """The structure JOBOBJECT_EXTENDED_LIMIT_INFORMATION of Windows."""

    _fields_: ClassVar = [
        ("process_time", ctypes.c_int64),
        ("job_time", ctypes.c_int64),
        ("flags", ctypes.c_uint32),
        ("least_set", ctypes.c_size_t),
        ("largest_set", ctypes.c_size_t),
        ("processes", ctypes.c_uint32),
        ("affinity", ctypes.c_size_t),
        ("priority", ctypes.c_uint32),
        ("scheduling", ctypes.c_uint32),
        ("counters", ctypes.c_uint64 * 6),
        ("process_memory", ctypes.c_size_t),
        ("job_memory", ctypes.c_size_t),
        ("peak_process_memory", ctypes.c_size_t),
        ("peak_job_memory", ctypes.c_size_t),
    ]


def put_into_job(child: subprocess.Popen[Any], memory: int) -> object:
    """Limit a child's memory, and end it with this process; the result must be kept until then.

    Children on Unix do both themselves.
    """
    if sys.platform == "win32":
        kernel = ctypes.WinDLL("kernel32", use_last_error=True)
        kernel.CreateJobObjectW.restype = ctypes.c_void_p
        job = ctypes.c_void_p(kernel.CreateJobObjectW(None, None))
        limits = JobLimits(flags=LIMIT_PROCESS_MEMORY | KILL_ON_JOB_CLOSE, process_memory=memory)
        kernel.SetInformationJobObject(job, EXTENDED_LIMITS, ctypes.byref(limits), ctypes.sizeof(limits))
        kernel.AssignProcessToJobObject(job, ctypes.c_void_p(int(getattr(child, "_handle"))))  # noqa: B009
        return job
    else:
        return None


def end_job(job: object) -> None:
    """End all processes of a job, also those that its first one started; on Unix there are no jobs."""
    if sys.platform == "win32":
        ctypes.WinDLL("kernel32").CloseHandle(job)


def read_pipe(descriptor: int, count: int, seconds: float) -> bytes | None:
    """Return what a pipe has within some seconds, at most `count` bytes; none at its end. Return None if it is late."""
    if sys.platform == "win32":
        handle, waiting = msvcrt.get_osfhandle(descriptor), ctypes.c_uint32()
        peek, deadline = ctypes.WinDLL("kernel32").PeekNamedPipe, time.monotonic() + seconds
        arguments = ctypes.c_void_p(handle), None, 0, None, ctypes.byref(waiting), None
        while peek(*arguments) and not waiting.value:
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_SECONDS)
        return os.read(descriptor, count)
    else:
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            if not selector.select(max(0.0, seconds)):
                return None
        return os.read(descriptor, count)


def process_age() -> float:
    """Return the seconds since this process started, or its CPU time if the system does not say."""
    if sys.platform == "linux":
        with suppress(OSError, ValueError, IndexError):
            fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
            start = int(fields[19]) / os.sysconf("SC_CLK_TCK")
            return max(time.process_time(), time.clock_gettime(time.CLOCK_BOOTTIME) - start)
    return time.process_time()
