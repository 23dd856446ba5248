"""How much memory there is, how much this process has, and how it takes some."""

import ctypes
import mmap
import os
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np

ALIGNMENT = 64  # for vectors and tiles
HUGE_PAGE = 1 << 21  # a huge page; what is smaller comes from the heap

CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """Bytes that could be taken now: of the machine, and of this process's control group; None where it is not told."""
    limits = [limit for limit in (_machine_available(), _cgroup_available()) if limit is not None]
    return min(limits, default=None)


def resident_bytes() -> int:
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


def trim_heap() -> None:
    """Have the C library let go of freed memory: threads that worked leave it tens of megabytes that nobody else gets."""
    with suppress(AttributeError, OSError, TypeError):  # another library than GNU's
        ctypes.CDLL(None).malloc_trim(0)


def allocate(size: int) -> np.ndarray:
    """Bytes, zeroed by the system when first touched, aligned, in huge pages where there are such."""
    if size < HUGE_PAGE:
        memory = np.zeros(size + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        return memory[start : start + size]
    pages = mmap.mmap(-1, size + HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    start = -memory.ctypes.data % HUGE_PAGE
    return memory[start : start + size]


def _machine_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _cgroup_available() -> int | None:
    """Pages of files count as used, but are given up when they are needed."""
    try:
        limit, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        stats = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return max(
            0, limit - used + sum(int(stats.get(f"{kind}_file", 0)) for kind in ("active", "inactive"))
        )
    except (OSError, ValueError):  # no such group, or "max"
        return None
