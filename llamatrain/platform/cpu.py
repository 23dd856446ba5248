"""The processor's vector and tile units, a switch for each, and the class that kernels are compiled for.

`LLAMATRAIN_WITHOUT=amx,avx512bf16,avx512` disables units one by one, as if the machine had none: kernels that
need them are not used, and the compiler sees a smaller processor. So every fallback can be tested on a good
machine. The units of AArch64 are `dotprod`, `i8mm` and `bf16`.
"""

import hashlib
import os
import platform
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import NamedTuple

from llamatrain.errors import UsageError
from llamatrain.platform.affinity import usable_cpus
from llamatrain.platform.cpu_features import AARCH64, V3_FEATURES, X86_64, architecture, read_cpuinfo
from llamatrain.platform.cpu_features import read_features as _read_features

# unit: (the features it needs, the unit it builds on)
UNITS = {
    "avx512": (("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"), None),
    "avx512vnni": (("avx512vnni",), "avx512"),
    "avx512bf16": (("avx512bf16",), "avx512vnni"),
    "amx": (("amxtile", "amxbf16", "amxint8"), "avx512bf16"),
    "avxvnni": (("avxvnni",), None),
    "dotprod": (("asimddp",), None),
    "i8mm": (("i8mm",), "dotprod"),
    "bf16": (("bf16",), "dotprod"),
}
AARCH64_UNITS = frozenset({"dotprod", "i8mm", "bf16"})  # the others belong to x86-64
DISABLE_VARIABLE = "LLAMATRAIN_WITHOUT"
CLASS_VARIABLE = "LLAMATRAIN_CLASS"  # to compile for other machines
HOST = "host"  # instead of a CPU name: the machine of the compiler
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


class Processor(NamedTuple):
    """A class of processors that run the same code: LLVM's name of the smallest of them, plus features."""

    name: str
    cpu: str
    features: str
    units: frozenset[str]
    architecture: str = X86_64


WIDE_VECTORS = "-prefer-256-bit"  # use 512-bit registers if there are any
CLASSES = {
    each.name: each
    for each in (
        Processor(
            "sapphirerapids",
            "x86-64-v4",
            f"{WIDE_VECTORS},+avx512vnni,+avx512bf16,+amx-tile,+amx-bf16,+amx-int8",
            frozenset({"avx512", "avx512vnni", "avx512bf16", "amx"}),
        ),
        Processor(
            "x86-64-v4-bf16",
            "x86-64-v4",
            f"{WIDE_VECTORS},+avx512vnni,+avx512bf16",
            frozenset({"avx512", "avx512vnni", "avx512bf16"}),
        ),
        Processor(
            "x86-64-v4-vnni",
            "x86-64-v4",
            f"{WIDE_VECTORS},+avx512vnni",
            frozenset({"avx512", "avx512vnni"}),
        ),
        Processor("x86-64-v4", "x86-64-v4", WIDE_VECTORS, frozenset({"avx512"})),
        Processor("x86-64-v3-vnni", "x86-64-v3", "+avxvnni", frozenset({"avxvnni"})),
        Processor("x86-64-v3", "x86-64-v3", "", frozenset()),
        Processor(
            "armv8.6",
            "generic",
            "+v8.2a,+dotprod,+i8mm,+bf16",
            frozenset({"dotprod", "i8mm", "bf16"}),
            AARCH64,
        ),
        Processor("armv8.2-dotprod", "generic", "+v8.2a,+dotprod", frozenset({"dotprod"}), AARCH64),
        Processor("armv8", "generic", "", frozenset(), AARCH64),
    )
}


def disabled_units() -> frozenset[str]:
    """Return the units that LLAMATRAIN_WITHOUT disables."""
    names = frozenset(
        name.strip() for name in os.environ.get(DISABLE_VARIABLE, "").split(",") if name.strip()
    )
    if unknown := names - UNITS.keys():
        raise UsageError(
            f"{DISABLE_VARIABLE}: unknown unit {', '.join(sorted(unknown))}; known are {', '.join(UNITS)}",
            code="unknown-unit",
        )
    return names


def requested_class() -> Processor | None:
    """Return the class that LLAMATRAIN_CLASS requests, or None."""
    name = os.environ.get(CLASS_VARIABLE)
    if name and name not in CLASSES:
        raise UsageError(
            f"{CLASS_VARIABLE}: unknown class {name}; known are {', '.join(CLASSES)}", code="unknown-class"
        )
    return CLASSES[name] if name else None


@cache
def cpu_features() -> frozenset[str]:
    """Return the processor's features, without punctuation: avx512bf16, amxtile, asimddp."""
    return _read_features()


def enabled_units() -> frozenset[str]:
    """Return the units that this process uses: those of its class."""
    return processor().units


def usable_units() -> frozenset[str]:
    """Return the units that are present, allowed by the kernel, and not disabled."""
    disabled, present = disabled_units(), set[str]()
    here = architecture()
    for name, (needs, base) in UNITS.items():
        belongs_to = AARCH64 if name in AARCH64_UNITS else X86_64
        if belongs_to != here or name in disabled or (base and base not in present):
            continue
        if cpu_features().issuperset(needs) and (name != "amx" or request_amx()):
            present.add(name)
    return frozenset(present - {"avx512bf16"} if has_slow_bf16(present) else present)


def has_slow_bf16(units: Collection[str]) -> bool:
    """Return True if the processor multiplies bf16 by vectors alone, and more slowly than float32.

    On Intel's processors since Sapphire Rapids, which have avx512fp16, vectors of bf16 take twice as long. They
    have tiles for bf16, but a virtual machine may hide them.
    """
    is_intel = read_cpuinfo().get("vendor_id") == "GenuineIntel"
    return "amx" not in units and is_intel and "avx512fp16" in cpu_features()


def request_amx() -> bool:
    """Ask Linux for the tile registers: a process that touches them without permission is killed."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    import ctypes

    arch_prctl, req_xcomp_perm, xtiledata = 158, 0x1023, 18
    return ctypes.CDLL(None, use_errno=True).syscall(arch_prctl, req_xcomp_perm, xtiledata) == 0


@cache
def processor() -> Processor:
    """Return the first class whose code this process can run, or a class of its own if it belongs to none."""
    if requested := requested_class():
        if "amx" in requested.units:
            request_amx()
        return requested
    present, here = usable_units(), architecture()
    if here == AARCH64 or (here == X86_64 and cpu_features().issuperset(V3_FEATURES)):
        return next(each for each in CLASSES.values() if each.architecture == here and each.units <= present)
    return _unnamed_class(present)


def _unnamed_class(present: frozenset[str]) -> Processor:
    """Return a class named by what Linux reports, because the compiler may be missing."""
    fields = {name: value for name, value in read_cpuinfo().items() if name in CPU_FIELDS}
    digest = hashlib.sha256(repr((fields, sorted(cpu_features() | present))).encode()).hexdigest()[:8]
    return Processor(f"{platform.machine() or 'unknown'}-{digest}", HOST, "", present, architecture())


def count_cpus() -> int:
    """Return the number of processors that affinity and the control group's quota allow."""
    count = len(usable_cpus())
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(count, int(quota) // int(period)))
    except (OSError, ValueError):  # no such group, or "max"
        return count


def has_int8_products() -> bool:
    """Return True if kernels for this process can multiply 8-bit integers: all named classes can."""
    return processor().name in CLASSES


def int8_unit() -> str:
    """Return the unit that multiplies 8-bit integers; "numpy" if this process has no kernels for them."""
    if not has_int8_products():
        return "numpy"
    fastest = ("amx", "avx512vnni", "avxvnni", "avx512", "i8mm", "dotprod")
    smallest = "neon" if processor().architecture == AARCH64 else "avx2"
    return next((unit for unit in fastest if unit in enabled_units()), smallest)


def vector_width() -> int:
    """Return the number of float32 in a vector register."""
    if "avx512" in enabled_units():
        return 16
    return 8 if processor().architecture == X86_64 else 4
