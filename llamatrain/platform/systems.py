"""The platforms that kernel libraries are built for: an operating system and an architecture.

`LLAMATRAIN_PLATFORM=macos-arm64` compiles for another platform than this one; only scripts/build_kernels.py
sets it, together with LLAMATRAIN_CLASS.
"""

import os
import sys
from typing import NamedTuple

from llamatrain.errors import UsageError
from llamatrain.platform.cpu_features import AARCH64, X86_64, architecture

PLATFORM_VARIABLE = "LLAMATRAIN_PLATFORM"
LINUX, MACOS, WINDOWS = "linux", "darwin", "win32"  # as Python names them


class Platform(NamedTuple):
    """An operating system and an architecture."""

    name: str
    system: str  # as sys.platform names it
    architecture: str
    triple: str  # for LLVM
    wheel_tag: str
    classes: tuple[str, ...]  # the processor classes with a library

    @property
    def suffix(self) -> str:
        """The end of a library's filename."""
        return library_suffix(self.system)


X86_CLASSES = (
    "x86-64-v3",
    "x86-64-v3-vnni",
    "x86-64-v4",
    "x86-64-v4-vnni",
    "x86-64-v4-bf16",
    "sapphirerapids",
)
ARM_CLASSES = ("armv8", "armv8.2-dotprod", "armv8.6")
PLATFORMS = {
    each.name: each
    for each in (
        Platform(
            "linux-x86-64", LINUX, X86_64, "x86_64-unknown-linux-gnu", "manylinux_2_17_x86_64", X86_CLASSES
        ),
        Platform(
            "linux-aarch64",
            LINUX,
            AARCH64,
            "aarch64-unknown-linux-gnu",
            "manylinux_2_17_aarch64",
            ARM_CLASSES,
        ),
        # the first Apple silicon has dot products
        Platform(
            "macos-arm64",
            MACOS,
            AARCH64,
            "arm64-apple-macosx11.0.0",
            "macosx_11_0_arm64",
            ("armv8.2-dotprod", "armv8.6"),
        ),
        Platform(
            "macos-x86-64",
            MACOS,
            X86_64,
            "x86_64-apple-macosx11.0.0",
            "macosx_11_0_x86_64",
            ("x86-64-v3",),
        ),
        Platform(
            "windows-x86-64",
            WINDOWS,
            X86_64,
            "x86_64-pc-windows-msvc",
            "win_amd64",
            ("x86-64-v3", "x86-64-v4"),
        ),
        Platform("windows-arm64", WINDOWS, AARCH64, "aarch64-pc-windows-msvc", "win_arm64", ARM_CLASSES),
    )
}


def library_suffix(system: str) -> str:
    """Return the end of a library's filename on an operating system."""
    return {MACOS: ".dylib", WINDOWS: ".dll"}.get(system, ".so")


def host_platform() -> Platform | None:
    """Return the platform of this process; None if no libraries are built for it."""
    here = (sys.platform, architecture())
    return next((each for each in PLATFORMS.values() if (each.system, each.architecture) == here), None)


def target_platform() -> Platform | None:
    """Return the platform to compile for: what LLAMATRAIN_PLATFORM names, by default this one."""
    name = os.environ.get(PLATFORM_VARIABLE)
    if name and name not in PLATFORMS:
        raise UsageError(
            f"{PLATFORM_VARIABLE}: unknown platform {name}; known are {', '.join(PLATFORMS)}",
            code="unknown-platform",
        )
    return PLATFORMS[name] if name else host_platform()
