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
DISABLE_VARIABLE = "LLAMATRAIN_WITHOUT"
CLASS_VARIABLE = "LLAMATRAIN_CLASS"  # for those who compile for other machines
HOST = "host"  # in the place of a name: the compiler's own processor
CPU_FIELDS = (
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
V3_FEATURES = ("avx2", "fma", "f16c", "bmi1", "bmi2", "movbe")


class Processor(NamedTuple):
    """Processors for which the same code is compiled, by LLVM's name of the least of them and what is added to it."""

    name: str
    cpu: str
    features: str
    units: frozenset[str]


WIDE_VECTORS = "-prefer-256-bit"  # a processor that has wide registers uses them
CLASSES = {
    each.name: each
    for each in (
        Processor(
            "sapphirerapids", "x86-64-v4", f"{WIDE_VECTORS},+avx512bf16,+amx-tile,+amx-bf16", frozenset(UNITS)
        ),
        Processor(
            "x86-64-v4-bf16", "x86-64-v4", f"{WIDE_VECTORS},+avx512bf16", frozenset({"avx512", "avx512bf16"})
        ),
        Processor("x86-64-v4", "x86-64-v4", WIDE_VECTORS, frozenset({"avx512"})),
        Processor("x86-64-v3", "x86-64-v3", "", frozenset()),
    )
}


def disabled_units() -> frozenset[str]:
    names = frozenset(
        name.strip() for name in os.environ.get(DISABLE_VARIABLE, "").split(",") if name.strip()
    )
    if unknown := names - UNITS.keys():
        raise UsageError(
            f"{DISABLE_VARIABLE}: unknown unit {', '.join(sorted(unknown))}; known are {', '.join(UNITS)}"
        )
    return names


def requested_class() -> Processor | None:
    name = os.environ.get(CLASS_VARIABLE)
    if name and name not in CLASSES:
        raise UsageError(f"{CLASS_VARIABLE}: unknown class {name}; known are {', '.join(CLASSES)}")
    return CLASSES[name] if name else None


@cache
def cpu_features() -> frozenset[str]:
    """What the processor has, in names without marks: avx512bf16, amxtile."""
    fields = _read_cpuinfo()
    return (
        frozenset(fields.get("flags", fields.get("Features", "")).replace("_", "").split())
        if fields
        else _read_llvm_features()
    )


@cache
def _read_cpuinfo() -> dict[str, str]:
    """Of its first processor: of many, the whole file takes a while."""
    fields: dict[str, str] = {}
    try:
        with Path("/proc/cpuinfo").open(errors="replace") as lines:
            for line in lines:
                name, colon, value = line.partition(":")
                if not colon:
                    break
                fields[name.strip()] = value.strip()
    except OSError:
        pass
    return fields


def _read_llvm_features() -> frozenset[str]:
    try:
        import llvmlite.binding as llvm
    except ImportError:
        return frozenset()
    names = {"bmi": "bmi1"}
    present = (name for name, has in llvm.get_host_cpu_features().items() if has)
    return frozenset(names.get(name, name).replace("-", "").replace(".", "") for name in present)


def enabled_units() -> frozenset[str]:
    """Those that this process uses: its class's, and no other that may be there."""
    return processor().units


def usable_units() -> frozenset[str]:
    """Those that are present, allowed by the kernel, and not switched off."""
    disabled, present = disabled_units(), set[str]()
    for name, (needs, base) in UNITS.items():
        if name in disabled or (base and base not in present):
            continue
        if cpu_features().issuperset(needs) and (name != "amx" or request_amx()):
            present.add(name)
    return frozenset(present)


def request_amx() -> bool:
    """Ask Linux for the tile registers: a process that touches them unasked is killed."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    arch_prctl, req_xcomp_perm, xtiledata = 158, 0x1023, 18
    return ctypes.CDLL(None, use_errno=True).syscall(arch_prctl, req_xcomp_perm, xtiledata) == 0


@cache
def processor() -> Processor:
    """The first class whose code this process may run; of a machine that belongs to none, its own."""
    if requested := requested_class():
        if "amx" in requested.units:
            request_amx()
        return requested
    present = usable_units()
    if platform.machine() in ("x86_64", "AMD64") and cpu_features().issuperset(V3_FEATURES):
        return next(each for each in CLASSES.values() if each.units <= present)
    return _unnamed_class(present)


def _unnamed_class(present: frozenset[str]) -> Processor:
    """Called by what Linux says of it, as the compiler need not be there; what it is to the compiler it finds out itself."""
    fields = {name: value for name, value in _read_cpuinfo().items() if name in CPU_FIELDS}
    digest = hashlib.sha256(repr((fields, sorted(cpu_features() | present))).encode()).hexdigest()[:8]
    return Processor(f"{platform.machine() or 'unknown'}-{digest}", HOST, "", present)


def count_cpus() -> int:
    """By its affinity, and by the quota of its control group."""
    count = len(os.sched_getaffinity(0)) if platform.system() == "Linux" else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(count, int(quota) // int(period)))
    except (OSError, ValueError):  # no such group, or "max"
        return count


def vector_width() -> int:
    """How many float32 a vector register holds."""
    if "avx512" in enabled_units():
        return 16
    return 8 if platform.machine() in ("x86_64", "AMD64") else 4
