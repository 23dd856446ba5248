"""Loads machine code: shared libraries by the system's loader, unlinked object files by LLVM.

Linux loads libraries from memory. macOS and Windows load them where they are: a loaded library of Windows
cannot be deleted.
"""

import ctypes
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from llamatrain.platform.temp_files import create_temp_file, remove_path

ELF = b"\x7fELF"
SHARED = 3
TYPE_AT = 16

Find = Callable[[str], int]  # the address of a symbol; 0 if there is none
load_counter = count()


def load_code(code: bytes | memoryview, exported: str = "") -> Find:
    """Load code and return a lookup of its symbols. `exported` is a symbol that later code refers to."""
    if is_library(code):
        return _load_library(code, ctypes.RTLD_GLOBAL if exported else ctypes.RTLD_LOCAL)
    return _load_object(bytes(code), exported)


def is_library(code: bytes | memoryview) -> bool:
    """Return True for a shared library, False for an unlinked object file."""
    return bytes(code[:4]) == ELF and code[TYPE_AT] == SHARED


def _load_library(code: bytes | memoryview, mode: int) -> Find:
    """Load these bytes as a library, independent of the file they came from."""
    _preload_libm()
    try:
        library = _open_from_memory(code, mode)
    except OSError:  # no /proc, or memory files must not be executed
        file = create_temp_file()
        file.write_bytes(code)
        try:
            library = ctypes.CDLL(str(file), mode=mode)
        finally:
            remove_path(file)
    return _lookup(library)


def load_file(path: Path) -> Find:
    """Load a library where it is and return a lookup of its symbols."""
    return _lookup(ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL))


def _lookup(library: ctypes.CDLL) -> Find:
    def find(symbol: str) -> int:
        try:
            return ctypes.cast(library[symbol], ctypes.c_void_p).value or 0
        except AttributeError:
            return 0

    return find


@cache
def _preload_libm() -> None:
    """Load libm for all: our libraries leave `logf` undefined, and a static Python may not export it."""
    with suppress(OSError):  # libm is not a separate library here
        ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)


def _open_from_memory(code: bytes | memoryview, mode: int) -> ctypes.CDLL:
    if sys.platform == "linux":
        file = os.memfd_create("llamatrain-kernels")
        try:
            with os.fdopen(file, "wb", closefd=False) as stream:
                stream.write(code)
            # The loader takes equal paths for the same library, so each needs its own path.
            return ctypes.CDLL(f"/proc/self/fd/{'/' * next(load_counter)}{file}", mode=mode)
        finally:
            os.close(file)
    else:
        raise OSError("only Linux has memory files")


def _load_object(code: bytes, exported: str) -> Find:
    import llvmlite.binding as llvm

    engine = _engine()
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    if exported:
        llvm.add_symbol(exported, engine.get_function_address(exported))
    return lambda symbol: int(engine.get_function_address(symbol))


@cache
def _engine() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
