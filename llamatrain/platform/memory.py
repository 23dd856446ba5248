"""Memory: how much is available, how much this process uses, and aligned allocation."""

import ctypes
import mmap
import os
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np

ALIGNMENT = 64  # for vectors and tiles
HUGE_PAGE = 1 << 21  # bytes of a huge page; smaller sizes come from the heap

CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """Return the bytes that are available on the machine and in the control group, or None if unknown."""
    limits = [limit for limit in (_machine_available(), _cgroup_available()) if limit is not None]
    return min(limits, default=None)


def resident_bytes() -> int:
    """Return the bytes of this process that are resident."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        pass
    try:
        import resource
    except ImportError:  # Windows has none
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def trim_heap() -> None:
    """Return freed memory to the system: worker threads leave tens of megabytes in the C library's heap."""
    with suppress(AttributeError, OSError, TypeError):  # not the GNU C library
        ctypes.CDLL(None).malloc_trim(0)


def allocate(size: int) -> np.ndarray:
    """Return zeroed, aligned bytes, in huge pages if possible."""
    if size < HUGE_PAGE:
        memory = np.zeros(size + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        return memory[start : start + size]
    pages = mmap.mmap(-1, size + HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the kernel has no huge pages
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
    """Return the bytes left in the control group. Pages of files count as used there, but can be dropped."""
    try:
        limit, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        stats = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return max(
            0, limit - used + sum(int(stats.get(f"{kind}_file", 0)) for kind in ("active", "inactive"))
        )
    except (OSError, ValueError):  # no such group, or "max"
        return None
