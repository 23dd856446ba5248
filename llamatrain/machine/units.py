"""What the processor can do: its vector and tile units, with a switch for each.

`LLAMATRAIN_WITHOUT=amx,avx512bf16,avx512` turns units off, one by one, as if the machine had none: the kernels that need
them step aside, and the compiler is told of a smaller processor, so that every fallback can be tried on a good machine.
"""

import ctypes
import os
import platform
from functools import cache
from pathlib import Path

from llamatrain.errors import UsageError

# unit: (what LLVM calls the features it needs, what it stands on)
UNITS = {
    "avx512": (("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"), None),
    "avx512bf16": (("avx512bf16",), "avx512"),
    "amx": (("amx-tile", "amx-bf16"), "avx512"),
}
SWITCH = "LLAMATRAIN_WITHOUT"


def switched_off() -> frozenset[str]:
    names = frozenset(name.strip() for name in os.environ.get(SWITCH, "").split(",") if name.strip())
    if unknown := names - UNITS.keys():
        raise UsageError(f"{SWITCH}: unknown unit {', '.join(sorted(unknown))}; known are {', '.join(UNITS)}")
    return names


@cache
def units() -> frozenset[str]:
    """The units that this process may use: present, allowed by the kernel, and not switched off."""
    import llvmlite.binding as llvm

    off, here = switched_off(), set[str]()
    features = llvm.get_host_cpu_features()
    for name, (needs, base) in UNITS.items():
        if name in off or (base and base not in here):
            continue
        if all(features.get(feature, False) for feature in needs) and (name != "amx" or allow_tiles()):
            here.add(name)
    return frozenset(here)


def allow_tiles() -> bool:
    """Ask Linux for the tile registers: a process that touches them unasked is killed."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    arch_prctl, req_xcomp_perm, xtiledata = 158, 0x1023, 18
    return ctypes.CDLL(None, use_errno=True).syscall(arch_prctl, req_xcomp_perm, xtiledata) == 0


def target() -> tuple[str, str]:
    """Name and features of the processor to compile for, in LLVM's words."""
    import llvmlite.binding as llvm

    name, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features()
    if "avx512" in switched_off():
        name = "haswell" if features.get("avx2", False) else "generic"
        for feature in features:
            features[feature] = features[feature] and not feature.startswith(("avx512", "amx", "avx10", "evex512"))
    return name, features.flatten()


def cores() -> int:
    """How many processors this process may use: by its affinity, and by the quota of its control group."""
    count = len(os.sched_getaffinity(0)) if platform.system() == "Linux" else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(count, int(quota) // int(period)))
    except (OSError, ValueError):  # no such group, or "max"
        return count


def floats() -> int:
    """How many float32 a vector register holds."""
    if "avx512" in units():
        return 16
    return 8 if platform.machine() in ("x86_64", "AMD64") else 4
