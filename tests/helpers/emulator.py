"""What differs where an emulator runs the tests, as `scripts/test_arm` does: speed, and limits of memory."""

import platform
from pathlib import Path

import pytest


def is_emulated() -> bool:
    """Return True on ARM if /proc/cpuinfo shows the flags of an x86 processor: qemu passes its host's on."""
    try:
        return platform.machine() == "aarch64" and "\nflags" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


SLOWNESS = 20 if is_emulated() else 1  # for limits of time
needs_memory_limits = pytest.mark.skipif(is_emulated(), reason="qemu does not pass limits of memory on")
