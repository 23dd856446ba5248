"""Links object files to libraries for other platforms than this one, with the linkers that Zig brings.

`pip install ziglang` installs Zig. Equal objects in equal order give equal bytes on every machine.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from llamatrain.compiler.link import LinkError
from llamatrain.platform.cpu_features import AARCH64, X86_64
from llamatrain.platform.systems import LINUX, MACOS, WINDOWS, Platform

# AArch64 has kernels of Linux with pages of 4, 16 and 64 KB.
PAGE_SIZES = {X86_64: 4096, AARCH64: 65536}
ELF_EMULATIONS = {X86_64: "elf_x86_64", AARCH64: "aarch64linux"}
ZIG_NAMES = {X86_64: "x86_64", AARCH64: "aarch64"}
PE_MACHINES = {X86_64: "x64", AARCH64: "arm64"}
DLLTOOL_MACHINES = {X86_64: "i386:x86-64", AARCH64: "arm64"}
MACOS_VERSION = "11.0"

# What kernels for Windows may call. The universal C runtime is part of Windows 10.
PE_IMPORTS = {
    "kernel32": ("SwitchToThread",),
    "ucrtbase": ("exp", "expf", "log", "logf", "memcpy", "memmove", "memset"),
}

# What compilers for Windows take for granted: a mark of code with floating-point numbers, and a function that
# touches each page of a large stack frame, because Windows extends the stack page by page. It gets the size in
# rax, or a sixteenth of it in x15, and must keep all registers but x16 and x17.
PE_SUPPORT = {
    X86_64: """
.globl _fltused
.set _fltused, 0x9875
.text
.globl __chkstk
__chkstk:
    pushq %rcx
    pushq %rax
    leaq 24(%rsp), %rcx
1:  cmpq $4096, %rax
    jb 2f
    subq $4096, %rcx
    testq %rcx, (%rcx)
    subq $4096, %rax
    jmp 1b
2:  subq %rax, %rcx
    testq %rcx, (%rcx)
    popq %rax
    popq %rcx
    retq
""",
    AARCH64: """
.globl _fltused
.set _fltused, 0x9875
.text
.globl __chkstk
.p2align 2
__chkstk:
    lsl x16, x15, #4
    mov x17, sp
1:  subs x16, x16, #4096
    b.lo 2f
    sub x17, x17, #4096
    ldr xzr, [x17]
    b 1b
2:  ret
""",
}


@cache
def find_zig() -> tuple[str, ...]:
    """Return the command that runs Zig; empty if it is not installed."""
    if found := shutil.which("zig"):
        return (found,)
    return (sys.executable, "-m", "ziglang") if importlib.util.find_spec("ziglang") else ()


def cross_link(objects: Sequence[bytes], symbols: Sequence[str], target: Platform, name: str) -> bytes:
    """Link objects to one library for a platform; `symbols` are its exported functions."""
    if not find_zig():
        raise LinkError(f"a library for {target.name} needs Zig; pip install ziglang")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        files = [f"{index}.o" for index in range(len(objects))]
        for file, code in zip(files, objects, strict=True):
            (place / file).write_bytes(code)
        link = {LINUX: _link_elf, MACOS: _link_mach_o, WINDOWS: _link_pe}[target.system]
        out = f"{name}{target.suffix}"
        link(place, files, symbols, target, out)
        return (place / out).read_bytes()


def _link_elf(folder: Path, files: Sequence[str], symbols: Sequence[str], target: Platform, out: str) -> None:
    page = PAGE_SIZES[target.architecture]
    options = ["-m", ELF_EMULATIONS[target.architecture], "-shared", "-Bsymbolic", "--build-id=none", "-s"]
    pages = ["-z", "noexecstack", "-z", f"max-page-size={page}"]
    _run_zig(folder, "ld.lld", *options, *pages, "-o", out, *files)


def _link_mach_o(
    folder: Path, files: Sequence[str], symbols: Sequence[str], target: Platform, out: str
) -> None:
    """Link a library, with the ad-hoc signature that macOS asks for on AArch64."""
    system = f"{ZIG_NAMES[target.architecture]}-macos.{MACOS_VERSION}"
    options = ["-dynamic", "-target", system, "-OReleaseFast", "-fstrip", "-fno-compiler-rt", "-lc"]
    names = ["--name", "kernels", "-install_name", f"@rpath/{out}", f"-femit-bin={out}"]
    _run_zig(folder, "build-lib", *options, *names, *files)


def _link_pe(folder: Path, files: Sequence[str], symbols: Sequence[str], target: Platform, out: str) -> None:
    """Link a library without an entry point, which needs libraries of Windows alone."""
    (folder / "support.s").write_text(PE_SUPPORT[target.architecture])
    system = f"{ZIG_NAMES[target.architecture]}-windows-gnu"
    _run_zig(folder, "cc", "-target", system, "-c", "support.s", "-o", "support.o")
    for library, functions in PE_IMPORTS.items():
        lines = [f"LIBRARY {library}.dll", "EXPORTS", *functions]
        (folder / f"{library}.def").write_text("\n".join(lines) + "\n")
        machine = DLLTOOL_MACHINES[target.architecture]
        _run_zig(folder, "dlltool", "-m", machine, "-d", f"{library}.def", "-l", f"{library}.lib")
    exports = ["EXPORTS", *sorted(symbols)]
    (folder / "kernels.def").write_text(f"LIBRARY {out}\n" + "\n".join(exports) + "\n")
    options = ["/dll", "/noentry", "/nodefaultlib", "/brepro", "/debug:none", "/opt:ref,icf"]
    machine = f"/machine:{PE_MACHINES[target.architecture]}"
    imports = [f"{library}.lib" for library in PE_IMPORTS]
    inputs = ["/def:kernels.def", f"/out:{out}", *files, "support.o", *imports]
    _run_zig(folder, "lld-link", *options, machine, *inputs)


def _run_zig(folder: Path, *words: str) -> None:
    environment = {**os.environ, "ZIG_LOCAL_CACHE_DIR": str(folder / "cache")}
    result = subprocess.run(
        [*find_zig(), *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise LinkError(f"zig {words[0]} ended with {result.returncode}: {result.stderr.strip()[:500]}")
