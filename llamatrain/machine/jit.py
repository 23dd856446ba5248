"""The compiler behind the fast kernels: Numba, set up once, with a cache that an edit of any kernel invalidates.

An entry is a function compiled to `void (lo, hi, thread, args)`: it does items lo to hi of a job whose arrays and
numbers stand in `args`, a block of 64-bit words. One shape for all of them means that a list of calls is data (see
`machine/threads.py`), that nothing is dispatched on types, and that an entry compiles once and in a fraction of a second.
"""

import hashlib
import os
import pickle
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache, cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import caching, cgutils, config
from numba.core.runtime.nrt import rtsys
from numba.extending import intrinsic

from llamatrain.machine import units

PACKAGE = Path(__file__).resolve().parent.parent
COMPILED_HERE = ("machine", "kernels", "files/quants", "data/tokenizer")  # the folders whose sources end up in machine code


@cache
def cache_folder() -> Path | None:
    """`~/.cache/llamatrain/<key>`, or None where no such folder can be written."""
    key = hashlib.sha256()
    for source in sorted(path for folder in COMPILED_HERE for path in (PACKAGE / folder).rglob("*.py")):
        key.update(source.relative_to(PACKAGE).as_posix().encode() + b"\0" + source.read_bytes() + b"\0")
    versions = [version(name) for name in ("numba", "llvmlite", "numpy")]
    key.update(repr((units.target(), sorted(units.units()), sys.version_info[:3], platform.machine(), versions)).encode())
    try:
        home = os.environ.get("LLAMATRAIN_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(home) / "llamatrain" / key.hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # no such folder can be made, or there is no home
        return None


config.CPU_NAME, config.CPU_FEATURES = units.target()
config.THREADING_LAYER_PRIORITY = ["omp", "workqueue", "tbb"]
config.CACHE_DIR = str(cache_folder() or "")

# Addresses are integers here. Sinking one into a loop, LLVM may take the wrong summand for its pointer, find that it is 0 for
# the caller (whose code it sees later), and drop the code as undefined: seen in a decoder. So it shall not sink them that way.
llvm.set_option("", "-addr-sink-using-gep=false")


def _load_only(self: Any, signature: Any, context: Any) -> Any:
    """Take a function from the cache as Numba does, but leave what only compiling needs (20 MB, 0.3 s) until then."""
    rtsys.initialize(context)
    with self._guard_against_spurious_io_errors():
        return self._load_overload(signature, context)


caching.Cache.load_overload = _load_only

# Sums may be regrouped and products contracted, so that loops vectorise; infinities and NaN keep their meaning.
FAST = {"reassoc", "contract", "arcp", "nsz"}
WORDS = types.CPointer(types.int64)
ENTRY = types.void(types.int64, types.int64, types.int64, WORDS)

# A helper that entries call: compiled into them.
inline = partial(numba.njit, error_model="numpy", fastmath=FAST, nogil=True)


class Compiler:
    """Counts and times compilations, and says once that the first run is at it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.compiled = 0
        self.said = False
        self.say: Callable[[str], None] = lambda line: print(line, file=sys.stderr)

    def entry(self, body: Callable[..., None], signature: Any = ENTRY) -> Any:
        """The body as a function of the one shape that entries have, or of another."""
        return self._timed(lambda keep: numba.cfunc(signature, cache=keep, error_model="numpy", fastmath=FAST)(body))

    def function(self, signature: Any, body: Callable[..., Any], **how: bool) -> Any:
        """The body as a function that Python calls."""
        return self._timed(lambda keep: numba.njit(signature, cache=keep, nogil=True, **how)(body))

    def _timed(self, build: Callable[[bool], Any]) -> Any:
        folder, start = cache_folder(), time.perf_counter()
        try:
            made = build(folder is not None)
        except (OSError, EOFError, pickle.UnpicklingError) as broken:  # the disk is full, or a file was cut short
            self.say(f"the cache of kernels cannot be used ({broken}); without {folder} it will be made again")
            folder, made = None, build(False)
        if not (made.cache_hits if hasattr(made, "cache_hits") else sum(made.stats.cache_hits.values())):
            self.announce(folder)
            self.compiled += 1
            self.seconds += time.perf_counter() - start
        return made

    def announce(self, folder: Path | None) -> None:
        if not self.said:
            self.said = True
            keep = f"kept in {folder}" if folder else "not kept: no cache folder can be written"
            self.say(f"compiling kernels for this machine, once ({keep})")

    def report(self) -> None:
        """Say how long it took, if anything was compiled since the last report."""
        if self.compiled:
            self.say(f"compiled {self.compiled} kernels in {self.seconds:.1f} s")
        self.compiled, self.seconds = 0, 0.0


compiler = Compiler()


class Brick:
    """A function of integers, giving none, that entries call by name: compiled once, not into each of them.

    `brick.call` is that call for compiled code; it takes all the integers as one tuple.
    """

    made: ClassVar[list["Brick"]] = []

    def __init__(self, body: Callable[..., None]) -> None:
        self.body, self.symbol = body, f"llamatrain_{body.__name__}"
        self.signature = types.void(*[types.int64] * body.__code__.co_argcount)
        self.call = self._by_name()
        self.made.append(self)

    @cached_property
    def linked(self) -> Any:
        """The compiled body, known to the linker from here on."""
        made = compiler.entry(self.body, self.signature)
        llvm.add_symbol(self.symbol, made.address)
        return made

    def _by_name(self) -> Any:
        @intrinsic
        def call(typing_context: Any, values: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                words = [
                    context.cast(builder, word, kind, types.int64)
                    for word, kind in zip(cgutils.unpack_tuple(builder, args[0]), values.types, strict=True)
                ]
                kind = ir.FunctionType(ir.VoidType(), [word.type for word in words])
                builder.call(cgutils.get_or_insert_function(builder.module, kind, self.symbol), words)
                return context.get_dummy_value()

            return types.void(values), generate

        return call


class Entry:
    """A kernel body `(lo, hi, thread, args)`, compiled when its address is first asked for."""

    def __init__(self, body: Callable[..., None]) -> None:
        self.body = body
        self.name = body.__name__

    @cached_property
    def compiled(self) -> Any:
        for brick in Brick.made:
            assert brick.linked
        return compiler.entry(self.body)

    @property
    def address(self) -> int:
        return int(self.compiled.address)

    def call(self, *args: "np.ndarray | int | float", items: int, block: int) -> "Call":
        """One row of a program: this entry over `items`, `block` at a time, with these arrays and numbers."""
        return Call(self, args, items, max(1, block))


class Call:
    """An entry with its arguments laid out as words, arrays by address (and kept alive here)."""

    __slots__ = ("args", "block", "entry", "items", "kept")

    def __init__(self, entry: Entry, args: tuple[Any, ...], items: int, block: int) -> None:
        self.entry, self.items, self.block, self.kept = entry, items, block, args
        self.args = np.array([_word(value) for value in args] or [0], np.int64)


def _word(value: Any) -> int:
    if isinstance(value, np.ndarray):
        if not value.flags.c_contiguous:
            raise ValueError(f"a compiled kernel was given an array with strides {value.strides}")
        return int(value.ctypes.data)
    if isinstance(value, float | np.floating):
        return int(np.float64(value).view(np.int64))
    return int(value)


# ---- words to what they stand for ------------------------------------------


def _pointer_to(element: Any) -> Any:
    @intrinsic
    def pointer(typing_context: Any, word: Any) -> Any:
        kind = types.CPointer(element)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(kind))

        return kind(types.int64), generate

    return pointer


f32 = _pointer_to(types.float32)
u16 = _pointer_to(types.uint16)
u8 = _pointer_to(types.uint8)
i32 = _pointer_to(types.int32)
i64 = _pointer_to(types.int64)
f64 = _pointer_to(types.float64)


@intrinsic
def real(typing_context: Any, word: Any) -> Any:
    """The float64 whose bits are `word`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), generate
