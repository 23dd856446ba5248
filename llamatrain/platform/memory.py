"""How much memory there is, how much this process has, and how it takes some."""

import ctypes
import mmap
import os
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np

ALIGNMENT = 64  # for vectors and tiles
LARGE = 1 << 21  # a huge page; what is smaller comes from the heap

GROUP = Path("/sys/fs/cgroup")


def available() -> int | None:
    """Bytes that could be taken now: of the machine, and of this process's control group; None where it is not told."""
    found = [left for left in (_of_machine(), _of_group()) if left is not None]
    return min(found, default=None)


def resident() -> int:
    """Bytes that this process holds in memory now."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        pass
    try:
        import resource
    except ImportError:  # no such thing on Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def give_back() -> None:
    """Have the C library let go of freed memory: threads that worked leave it tens of megabytes that nobody else gets."""
    with suppress(AttributeError, OSError, TypeError):  # another library than GNU's
        ctypes.CDLL(None).malloc_trim(0)


def allocate(size: int) -> np.ndarray:
    """Bytes, zeroed by the system when first touched, aligned, in huge pages where there are such."""
    if size < LARGE:
        memory = np.zeros(size + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        return memory[start : start + size]
    pages = mmap.mmap(-1, size + LARGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    start = -memory.ctypes.data % LARGE
    return memory[start : start + size]


def _of_machine() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _of_group() -> int | None:
    """Pages of files count as used, but are given up when they are needed."""
    try:
        limit, used = (int((GROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        told = dict(line.split() for line in (GROUP / "memory.stat").read_text().splitlines())
        return max(0, limit - used + sum(int(told.get(f"{kind}_file", 0)) for kind in ("active", "inactive")))
    except (OSError, ValueError):  # no such group, or "max"
        return None
