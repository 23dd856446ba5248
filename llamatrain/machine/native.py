"""Machine code: what decides it, what the process needs before it can run, and its way into bytes and back."""

import hashlib
import pickle
import platform
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from numba.core import codegen, config
from numba.core.compiler import CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.runtime.nrt import rtsys
from numba.core.serialize import dumps

from llamatrain.machine import units

PACKAGE = Path(__file__).resolve().parent.parent
COMPILED_HERE = ("machine", "kernels", "files/quants", "data/tokenizer")  # the folders whose sources end up in machine code


@cache
def setup() -> None:
    """What is Numba's for the whole process, said when something is first compiled or loaded and not before."""
    context, target = cpu_target.target_context, units.target()
    declared_for = context.codegen().magic_tuple()[1:]
    config.CPU_NAME, config.CPU_FEATURES = target
    if declared_for != target:  # the first function that was declared, at an import, brought a compiler for this very processor
        context._internal_codegen = codegen.JITCPUCodegen("numba.exec")
    config.THREADING_LAYER_PRIORITY = ["omp", "workqueue", "tbb"]
    # Addresses are integers here. Sinking one into a loop, LLVM may take the wrong summand for its pointer, find that it is 0
    # for the caller (whose code it sees later), and drop the code as undefined: seen in a decoder. So it shall not do that.
    llvm.set_option("", "-addr-sink-using-gep=false")


@cache
def cache_key() -> str:
    """Of all sources that end up in machine code, the processor and the versions: Numba sees no edit of a called file."""
    key = hashlib.sha256()
    for source in sorted(path for folder in COMPILED_HERE for path in (PACKAGE / folder).rglob("*.py")):
        key.update(source.relative_to(PACKAGE).as_posix().encode() + b"\0" + source.read_bytes() + b"\0")
    versions = [version(name) for name in ("numba", "llvmlite", "numpy")]
    key.update(repr((units.target(), sorted(units.units()), sys.version_info[:3], platform.machine(), versions)).encode())
    return key.hexdigest()[:16]


def facts_of(body: Callable[..., Any], signature: Any, how: dict[str, bool]) -> str:
    """All that decides the code of a function, in a line."""
    code = body.__code__
    around = dumps(tuple(cell.cell_contents for cell in body.__closure__)) if body.__closure__ else b""
    place = f"{body.__module__}:{body.__qualname__}:{code.co_firstlineno}"
    return repr((cache_key(), place, _stamp(code.co_filename), repr(signature), sorted(how.items()), around))


@cache
def _stamp(source: str) -> str:
    return hashlib.sha256(Path(source).read_bytes()).hexdigest()


def packed(made: Any) -> bytes | None:
    """What Numba made, to be kept; nothing of code that is good for this process alone."""
    with global_compiler_lock:
        return None if made.library.has_dynamic_globals else dumps(made._reduce())


def unpacked(code: bytes | memoryview) -> Any:
    """What Numba made, less what only compiling needs (20 MB, 0.3 s)."""
    context = cpu_target.target_context
    rtsys.initialize(context)
    with global_compiler_lock:
        return CompileResult._rebuild(context, *pickle.loads(code))
