"""The architecture of this process, and the processor's features as the operating system reports them.

Names are those of Linux, without punctuation: avx512bf16, amxtile, asimddp, i8mm.
"""

import ctypes
import platform
import sys
from functools import cache
from pathlib import Path

X86_64, AARCH64 = "x86-64", "aarch64"
V3_FEATURES = ("avx2", "fma", "f16c", "bmi1", "bmi2", "movbe")  # of the class x86-64-v3
V4_FEATURES = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd")

# Bits of the auxiliary vector of Linux on AArch64.
AT_HWCAP, AT_HWCAP2 = 16, 26
HWCAP = {"asimd": 1 << 1, "asimdhp": 1 << 10, "asimddp": 1 << 20}
HWCAP2 = {"i8mm": 1 << 13, "bf16": 1 << 14}

# Names of sysctl on macOS.
DARWIN_ARM = {
    "asimddp": "hw.optional.arm.FEAT_DotProd",
    "asimdhp": "hw.optional.arm.FEAT_FP16",
    "i8mm": "hw.optional.arm.FEAT_I8MM",
    "bf16": "hw.optional.arm.FEAT_BF16",
}
DARWIN_X86 = {
    "avx2": "hw.optional.avx2_0",
    "fma": "hw.optional.fma",
    "f16c": "hw.optional.f16c",
    "bmi1": "hw.optional.bmi1",
    "bmi2": "hw.optional.bmi2",
}

# Numbers of IsProcessorFeaturePresent on Windows (winnt.h).
WINDOWS_ARM = {"asimddp": 43, "asimdhp": 67, "i8mm": 66, "bf16": 68}
WINDOWS_AVX2, WINDOWS_AVX512F = 40, 41


def architecture() -> str:
    """Return the architecture of this process: x86-64, aarch64, or what the system calls it."""
    if sys.platform == "win32":  # the machine may emulate another architecture
        machine = "arm64" if "(arm64)" in sys.version.lower() else platform.machine()
        machine = "amd64" if "(amd64)" in sys.version.lower() else machine
    else:
        machine = platform.machine()
    names = {"x86_64": X86_64, "amd64": X86_64, "aarch64": AARCH64, "arm64": AARCH64}
    return names.get(machine.lower(), machine.lower())


def read_features() -> frozenset[str]:
    """Return the features that the system reports for this architecture; none if it is unknown."""
    here = architecture()
    readers = {"darwin": _read_darwin, "win32": _read_windows}
    return readers.get(sys.platform, _read_linux)(here)


def _read_linux(here: str) -> frozenset[str]:
    """Ask Linux. An emulator shows the /proc/cpuinfo of its host, but its own auxiliary vector."""
    if here == AARCH64:
        return _read_auxiliary_vector() or _read_field("Features")
    return _read_field("flags") if here == X86_64 else frozenset()


def _read_field(name: str) -> frozenset[str]:
    return frozenset(read_cpuinfo().get(name, "").replace("_", "").split())


@cache
def read_cpuinfo() -> dict[str, str]:
    """Read the first processor's entry of /proc/cpuinfo; with many processors, the whole file takes a while."""
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


def _read_auxiliary_vector() -> frozenset[str]:
    """Return the features in the auxiliary vector of Linux on AArch64; none if it cannot be read."""
    try:
        getauxval = ctypes.CDLL(None).getauxval
    except (OSError, AttributeError):
        return frozenset()
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    return decode_hwcaps(getauxval(AT_HWCAP), getauxval(AT_HWCAP2))


def decode_hwcaps(first: int, second: int) -> frozenset[str]:
    """Return the features that two words of the auxiliary vector name."""
    return frozenset(
        name
        for table, word in ((HWCAP, first), (HWCAP2, second))
        for name, bit in table.items()
        if word & bit
    )


def _read_darwin(here: str) -> frozenset[str]:
    """Ask macOS. AVX-512 is left out: some versions lose its mask registers when a signal arrives."""
    if here == AARCH64:
        return frozenset(name for name, key in DARWIN_ARM.items() if _sysctl_number(key)) | {"asimd"}
    features = frozenset(name for name, key in DARWIN_X86.items() if _sysctl_number(key))
    return features | {"movbe"} if "avx2" in features else features  # all processors with AVX2 have MOVBE


def _sysctl_number(name: str) -> int:
    """Return a number of macOS's kernel; 0 if there is none of this name."""
    value, size = ctypes.c_int64(0), ctypes.c_size_t(8)
    failed = ctypes.CDLL(None).sysctlbyname(
        name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)
    )
    return 0 if failed else value.value


def _read_windows(here: str) -> frozenset[str]:
    """Ask Windows, which knows the units of AArch64, but only AVX2 and AVX-512F of x86-64.

    Processors with AVX2 that run Windows have the rest of x86-64-v3, and those with AVX-512F the rest of
    x86-64-v4, except for Xeon Phi. What comes after that (VNNI, bfloat16) is not used.
    """
    features = set[str]()
    if sys.platform == "win32":
        has = ctypes.WinDLL("kernel32").IsProcessorFeaturePresent
        if here == AARCH64:
            return frozenset(name for name, number in WINDOWS_ARM.items() if has(number)) | {"asimd"}
        features.update(V3_FEATURES if has(WINDOWS_AVX2) else ())
        features.update(V4_FEATURES if features and has(WINDOWS_AVX512F) else ())
    return frozenset(features)
