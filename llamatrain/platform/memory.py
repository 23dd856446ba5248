"""Memory: how much is available, how much this process uses, and aligned allocation."""

import ctypes
import mmap
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

if sys.platform != "win32":
    import resource

ALIGNMENT = 64  # for vectors and tiles
HUGE_PAGE = 1 << 21  # bytes of a huge page; smaller sizes come from the heap

CGROUP = Path("/sys/fs/cgroup")


class WindowsMemory(ctypes.Structure):
    """The structure MEMORYSTATUSEX of Windows; the fields with a letter for a name are not read."""

    _fields_: ClassVar = [
        ("size", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("total", "available", *"abcde")),
    ]


class WindowsCounters(ctypes.Structure):
    """The structure PROCESS_MEMORY_COUNTERS of Windows; the fields with a letter for a name are not read."""

    _fields_: ClassVar = [
        ("size", ctypes.c_uint32),
        ("faults", ctypes.c_uint32),
        *((name, ctypes.c_size_t) for name in ("peak", "resident", *"abcdef")),
    ]


def available_bytes() -> int | None:
    """Return the bytes that are available on the machine and in the control group, or None if unknown."""
    limits = [limit for limit in (_machine_available(), _cgroup_available()) if limit is not None]
    return min(limits, default=None)


def total_bytes() -> int | None:
    """Return the machine's memory in bytes, or None if the system does not say."""
    if sys.platform == "win32":
        return int(_windows_memory().total)
    else:
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError):
            return None


def address_limit() -> int | None:
    """Return how many bytes of addresses this process may have, or None if there is no limit."""
    if sys.platform == "win32":
        return None
    else:
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        return None if limit == resource.RLIM_INFINITY else limit


def resident_bytes() -> int:
    """Return the bytes of this process that are resident; on macOS, the most that were."""
    if sys.platform == "win32":
        counters = WindowsCounters(size=ctypes.sizeof(WindowsCounters))
        kernel = ctypes.WinDLL("kernel32")
        kernel.GetCurrentProcess.restype = ctypes.c_void_p
        process = ctypes.c_void_p(kernel.GetCurrentProcess())
        kernel.K32GetProcessMemoryInfo(process, ctypes.byref(counters), counters.size)
        return int(counters.resident)
    else:
        with suppress(OSError, ValueError, IndexError):
            return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def drop_pages(mapped: mmap.mmap, first: int, size: int) -> None:
    """Let the system take back pages of a mapped file, which a later read maps again."""
    if sys.platform == "win32":
        address = np.frombuffer(mapped, np.uint8).ctypes.data + first
        ctypes.WinDLL("kernel32").VirtualUnlock(ctypes.c_void_p(address), ctypes.c_size_t(size))
    else:
        mapped.madvise(mmap.MADV_DONTNEED, first, size)


def request_pages_of_file(mapped: mmap.mmap, first: int, size: int) -> None:
    """Let the system read pages of a mapped file soon. Windows has no such call for all versions."""
    if sys.platform != "win32":
        mapped.madvise(mmap.MADV_WILLNEED, first, size)


def trim_heap() -> None:
    """Return freed memory to the system: worker threads leave tens of megabytes in the C library's heap."""
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):  # not the GNU C library
            ctypes.CDLL(None).malloc_trim(0)


def allocate(size: int) -> np.ndarray:
    """Return zeroed, aligned bytes, in huge pages if possible."""
    if size < HUGE_PAGE:
        memory = np.zeros(size + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        return memory[start : start + size]
    pages = mmap.mmap(-1, size + HUGE_PAGE)
    if sys.platform == "linux":
        with suppress(OSError):  # the kernel has no huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    start = -memory.ctypes.data % HUGE_PAGE
    return memory[start : start + size]


def _machine_available() -> int | None:
    if sys.platform == "win32":
        return int(_windows_memory().available)
    elif sys.platform == "darwin":
        return _mac_available()
    else:
        return _linux_available()


def _linux_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _windows_memory() -> Any:
    status = WindowsMemory(size=ctypes.sizeof(WindowsMemory))
    if sys.platform == "win32":
        ctypes.WinDLL("kernel32").GlobalMemoryStatusEx(ctypes.byref(status))
    return status


def _mac_available() -> int | None:
    """Return the share of the memory that macOS counts as free under its present load."""
    level, size = ctypes.c_int(), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    sysctl = ctypes.CDLL(None).sysctlbyname
    total = total_bytes()
    if total is None or sysctl(
        b"kern.memorystatus_level", ctypes.byref(level), ctypes.byref(size), None, ctypes.c_size_t(0)
    ):
        return None
    return total * level.value // 100


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
