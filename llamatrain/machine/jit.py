"""The compiler behind the fast kernels: Numba, set up once, with a cache that an edit of any kernel invalidates."""

import hashlib
import platform
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba
from numba.core import caching, codegen, config, sigutils
from numba.core.ccallback import CFunc
from numba.core.errors import NumbaError
from numba.core.registry import cpu_target
from numba.core.runtime.nrt import rtsys

from llamatrain.machine import cachefolder, units
from llamatrain.machine.terminal import say

PACKAGE = Path(__file__).resolve().parent.parent
COMPILED_HERE = ("machine", "kernels", "files/quants", "data/tokenizer")  # the folders whose sources end up in machine code

# Sums may be regrouped and products contracted, so that loops vectorise; infinities and NaN keep their meaning.
FAST = {"reassoc", "contract", "arcp", "nsz"}

# A helper that entries call: compiled into them.
inline = partial(numba.njit, error_model="numpy", fastmath=FAST, nogil=True)

# A part of one entry, under a name of its own: woven into it before anything is compiled, and so not compiled twice.
woven = partial(inline, inline="always")


@cache
def setup() -> None:
    """What is Numba's for the whole process, said when something is first compiled and not before."""
    context, target = cpu_target.target_context, units.target()
    declared_for = context.codegen().magic_tuple()[1:]
    config.CPU_NAME, config.CPU_FEATURES = target
    if declared_for != target:  # the first function that was declared, at an import, brought a compiler for this very processor
        context._internal_codegen = codegen.JITCPUCodegen("numba.exec")
    config.THREADING_LAYER_PRIORITY = ["omp", "workqueue", "tbb"]
    # Addresses are integers here. Sinking one into a loop, LLVM may take the wrong summand for its pointer, find that it is 0
    # for the caller (whose code it sees later), and drop the code as undefined: seen in a decoder. So it shall not do that.
    llvm.set_option("", "-addr-sink-using-gep=false")


# ---- what was compiled before ----------------------------------------------


@cache
def cache_key() -> str:
    """Of all sources that end up in machine code, the processor and the versions: Numba sees no edit of a called file."""
    key = hashlib.sha256()
    for source in sorted(path for folder in COMPILED_HERE for path in (PACKAGE / folder).rglob("*.py")):
        key.update(source.relative_to(PACKAGE).as_posix().encode() + b"\0" + source.read_bytes() + b"\0")
    versions = [version(name) for name in ("numba", "llvmlite", "numpy")]
    key.update(repr((units.target(), sorted(units.units()), sys.version_info[:3], platform.machine(), versions)).encode())
    return key.hexdigest()[:16]


@cache
def cache_folder() -> Path | None:
    return cachefolder.cache_folder(cache_key())


class Place:
    """Where Numba finds what it kept of a function: in our folder, by module."""

    def __init__(self, body: Callable[..., Any], source: str) -> None:
        self.body, self.source = body, source

    @classmethod
    def from_function(cls, body: Callable[..., Any], source: str) -> "Place | None":
        return cls(body, source) if cache_folder() else None

    def ensure_cache_path(self) -> None:
        kept_of(self.body.__module__).mkdir(exist_ok=True)

    def get_cache_path(self) -> str:
        return str(kept_of(self.body.__module__))

    def get_source_stamp(self) -> bytes:
        return hashlib.sha256(Path(self.source).read_bytes()).digest()

    def get_disambiguator(self) -> str:
        return str(self.body.__code__.co_firstlineno)


def kept_of(module: str) -> Path:
    """The folder of a module's functions."""
    folder = cache_folder()
    assert folder is not None
    return folder / module.rpartition(".")[0]


class KernelCache(caching.FunctionCache):
    class _impl_class(caching.FunctionCache._impl_class):  # noqa: N801  Numba's name
        _locator_classes = (Place,)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Take a function as Numba does, but leave what only compiling needs (20 MB, 0.3 s) until then."""
        rtsys.initialize(target_context)
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)


# ---- compiling -------------------------------------------------------------


class Compiler:
    """Counts and times compilations, and says once that the first run is at it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.compiled = 0
        self.said = self.failed = False
        self.say: Callable[[str], None] = say

    def entry(self, body: Callable[..., None], signature: Any) -> Any:
        """The body as a function that compiled code calls by its address."""
        made = CFunc(body, sigutils.normalize_signature(signature), {}, {"error_model": "numpy", "fastmath": FAST})
        return self._timed(body, made, made.compile)

    def function(self, signature: Any, body: Callable[..., Any], **how: bool) -> Any:
        """The body as a function that Python calls."""
        made = numba.njit(nogil=True, **how)(body)
        self._timed(body, made, lambda: made.compile(signature))
        made.disable_compile()
        return made

    def _timed(self, body: Callable[..., Any], made: Any, build: Callable[[], Any]) -> Any:
        setup()
        folder, start = None if self.failed else cache_folder(), time.perf_counter()
        try:
            made._cache = KernelCache(body) if folder else caching.NullCache()
            build()
        except NumbaError:
            raise
        except Exception as broken:  # the disk is full, or a file is damaged, of which a pickle may make anything
            self.say(f"the cache of kernels cannot be used ({broken}); without {folder} it will be made again")
            made._cache, self.failed = caching.NullCache(), isinstance(broken, OSError)
            build()
        if not (made.cache_hits if hasattr(made, "cache_hits") else sum(made.stats.cache_hits.values())):
            self.announce()
            self.compiled += 1
            self.seconds += time.perf_counter() - start
        return made

    def announce(self) -> None:
        if not self.said:
            self.said = True
            folder, wanted = cache_folder(), cachefolder.wanted(cache_key())
            if folder and folder == wanted:
                self.say(f"compiling kernels for this machine, once (kept in {folder})")
            else:
                why = f"{wanted} cannot be written" if wanted else "there is no home"
                self.say(f"compiling kernels for this run alone: {why}; {cachefolder.SWITCH} names another folder")

    def report(self) -> None:
        """Say how long it took, if anything was compiled since the last report."""
        if self.compiled:
            self.say(f"compiled {self.compiled} kernels in {self.seconds:.1f} s")
        self.compiled, self.seconds = 0, 0.0


compiler = Compiler()
