"""What the processor can do: its vector and tile units, with a switch for each, and the class that kernels are compiled for.

`LLAMATRAIN_WITHOUT=amx,avx512bf16,avx512` turns units off, one by one, as if the machine had none: the kernels that need
them step aside, and the compiler is told of a smaller processor, so that every fallback can be tried on a good machine.
"""

import ctypes
import hashlib
import os
import platform
from functools import cache
from pathlib import Path
from typing import NamedTuple

from llamatrain.errors import UsageError

# unit: (the features it needs, what it stands on)
UNITS = {
    "avx512": (("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"), None),
    "avx512bf16": (("avx512bf16",), "avx512"),
    "amx": (("amxtile", "amxbf16"), "avx512"),
}
SWITCH = "LLAMATRAIN_WITHOUT"
CLASS = "LLAMATRAIN_CLASS"  # for those who compile for other machines
HOST = "host"  # in the place of a name: the compiler's own processor
KIND = (
    "flags",
    "Features",
    "vendor_id",
    "cpu family",
    "model",
    "CPU implementer",
    "CPU architecture",
    "CPU variant",
    "CPU part",
)
COMMON = ("avx2", "fma", "f16c", "bmi1", "bmi2", "movbe")


class Processor(NamedTuple):
    """Processors for which the same code is compiled, by LLVM's name of the least of them and what is added to it."""

    name: str
    cpu: str
    features: str
    units: frozenset[str]


WIDE = "-prefer-256-bit"  # a processor that has wide registers uses them
CLASSES = {
    each.name: each
    for each in (
        Processor("sapphirerapids", "x86-64-v4", f"{WIDE},+avx512bf16,+amx-tile,+amx-bf16", frozenset(UNITS)),
        Processor("x86-64-v4-bf16", "x86-64-v4", f"{WIDE},+avx512bf16", frozenset({"avx512", "avx512bf16"})),
        Processor("x86-64-v4", "x86-64-v4", WIDE, frozenset({"avx512"})),
        Processor("x86-64-v3", "x86-64-v3", "", frozenset()),
    )
}


def switched_off() -> frozenset[str]:
    names = frozenset(name.strip() for name in os.environ.get(SWITCH, "").split(",") if name.strip())
    if unknown := names - UNITS.keys():
        raise UsageError(f"{SWITCH}: unknown unit {', '.join(sorted(unknown))}; known are {', '.join(UNITS)}")
    return names


def asked_for() -> Processor | None:
    name = os.environ.get(CLASS)
    if name and name not in CLASSES:
        raise UsageError(f"{CLASS}: unknown class {name}; known are {', '.join(CLASSES)}")
    return CLASSES[name] if name else None


@cache
def features() -> frozenset[str]:
    """What the processor has, in names without marks: avx512bf16, amxtile."""
    told = _told_by_linux()
    return (
        frozenset(told.get("flags", told.get("Features", "")).replace("_", "").split())
        if told
        else _features_by_llvm()
    )


@cache
def _told_by_linux() -> dict[str, str]:
    """Of its first processor: of many, the whole file takes a while."""
    told: dict[str, str] = {}
    try:
        with Path("/proc/cpuinfo").open(errors="replace") as lines:
            for line in lines:
                name, colon, value = line.partition(":")
                if not colon:
                    break
                told[name.strip()] = value.strip()
    except OSError:
        pass
    return told


def _features_by_llvm() -> frozenset[str]:
    try:
        import llvmlite.binding as llvm
    except ImportError:
        return frozenset()
    names = {"bmi": "bmi1"}
    there = (name for name, has in llvm.get_host_cpu_features().items() if has)
    return frozenset(names.get(name, name).replace("-", "").replace(".", "") for name in there)


def units() -> frozenset[str]:
    """Those that this process uses: its class's, and no other that may be there."""
    return processor().units


def usable() -> frozenset[str]:
    """Those that are present, allowed by the kernel, and not switched off."""
    off, here = switched_off(), set[str]()
    for name, (needs, base) in UNITS.items():
        if name in off or (base and base not in here):
            continue
        if features().issuperset(needs) and (name != "amx" or allow_tiles()):
            here.add(name)
    return frozenset(here)


def allow_tiles() -> bool:
    """Ask Linux for the tile registers: a process that touches them unasked is killed."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    arch_prctl, req_xcomp_perm, xtiledata = 158, 0x1023, 18
    return ctypes.CDLL(None, use_errno=True).syscall(arch_prctl, req_xcomp_perm, xtiledata) == 0


@cache
def processor() -> Processor:
    """The first class whose code this process may run; of a machine that belongs to none, its own."""
    if asked := asked_for():
        if "amx" in asked.units:
            allow_tiles()
        return asked
    here = usable()
    if platform.machine() in ("x86_64", "AMD64") and features().issuperset(COMMON):
        return next(each for each in CLASSES.values() if each.units <= here)
    return _its_own(here)


def _its_own(here: frozenset[str]) -> Processor:
    """Called by what Linux says of it, as the compiler need not be there; what it is to the compiler it finds out itself."""
    kind = {name: value for name, value in _told_by_linux().items() if name in KIND}
    mark = hashlib.sha256(repr((kind, sorted(features() | here))).encode()).hexdigest()[:8]
    return Processor(f"{platform.machine() or 'unknown'}-{mark}", HOST, "", here)


def processors() -> int:
    """By its affinity, and by the quota of its control group."""
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
