"""Finds machine code: in the prebuilt library, in the cache on disk, or by compiling it."""

import hashlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path

from llamatrain.compiler import prebuilt
from llamatrain.compiler.declare import Compilable, KernelEntry, SharedKernel
from llamatrain.compiler.loader import is_library, load_code
from llamatrain.compiler.store import ObjectStore, object_name, seal
from llamatrain.errors import LlamatrainError
from llamatrain.platform.cache_dir import CACHE_VARIABLE, default_cache_dir, fallback_cache_dir
from llamatrain.platform.cache_prune import mark_used, prune
from llamatrain.platform.cpu import processor
from llamatrain.platform.terminal import log_line

COMPILERS = ("numba", "llvmlite")
INSTALL_HINT = "pip install 'llamatrain[compile]' installs a compiler"


@cache
def cache_key() -> str:
    """Return a hash of what decides machine code: the sources, the processor class, the compiler."""
    versions = [package_version(name) for name in COMPILERS] if has_compiler() else []
    return hashlib.sha256(
        repr((prebuilt.hash_sources(), processor()[:3], sys.platform, versions)).encode()
    ).hexdigest()[:16]


@cache
def has_compiler() -> bool:
    """Return True if the compiler packages are installed, not just folders of their names."""
    return all((spec := find_spec(name)) and spec.origin for name in COMPILERS)


def package_version(name: str) -> str:
    """Return the version of an installed package."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def describe_code(declared: Compilable) -> str:
    """Return everything that decides a function's code, as one line."""
    body, own = declared.body, ""
    if not declared.qualified_name.startswith("llamatrain."):
        closure = [repr(cell.cell_contents) for cell in body.__closure__ or ()]
        own = repr((_hash_file(body.__code__.co_filename), body.__code__.co_firstlineno, closure))
    return repr((cache_key(), declared.qualified_name, own))


@cache
def _hash_file(source: str) -> str:
    return hashlib.sha256(Path(source).read_bytes()).hexdigest()


class CompilerError(LlamatrainError):
    """The compiler does not work here."""


class CodeCache:
    """Finds and compiles functions, and reports the number and time of compilations."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.compiled = 0
        self.announced = self.use_marked = self.relinking_announced = False
        self.problem = ""  # what is wrong with the prebuilt library
        self.log: Callable[[str], None] = log_line
        self.addresses: dict[Compilable, int] = {}
        self.lookup_only = False
        self.skipped: list[Compilable] = []  # functions that would have been compiled

    @cached_property
    def store(self) -> ObjectStore:
        """The object files on disk."""
        return ObjectStore(default_cache_dir(cache_key()), fallback_cache_dir(cache_key()))

    @cached_property
    def library(self) -> Callable[[str], int]:
        """The lookup of symbols in the prebuilt library."""
        find, self.problem = prebuilt.open_library()
        if self.problem and has_compiler():
            self.log(f"{self.problem}; kernels are compiled")
        return find

    def is_available(self) -> bool:
        """Return True if kernels can be loaded or compiled; otherwise print a hint once."""
        if self.library is not prebuilt.find_nothing or has_compiler():
            return True
        if not self.announced:
            self.announced = True
            reason = self.problem or f"no compiled kernels for {processor().name}"
            self.log(f"{reason}: numpy does their work, many times slower; {INSTALL_HINT}")
        return False

    def get_address(self, declared: Compilable) -> int:
        """Return the address of a function, compiled if necessary; 0 if that is impossible."""
        if self.lookup_only and not self.find(declared):
            self.skipped.append(declared)
            return 0
        return self.is_available() and (self.find(declared) or (has_compiler() and self.compile(declared)))

    @contextmanager
    def without_compiling(self) -> Iterator[None]:
        """Compile nothing during the block; what is missing runs in Python."""
        before, self.lookup_only = self.lookup_only, True
        try:
            yield
        finally:
            self.lookup_only = before
            while self.skipped:
                self.skipped.pop().__dict__.pop("address", None)  # it may be compiled later

    def find(self, declared: Compilable) -> int:
        """Return the address of a function that need not be compiled, or 0.

        An entry is loaded together with the shared kernels that it may call.
        """
        if declared not in self.addresses:
            address = self.library(declared.symbol)
            if (
                not address
                and has_compiler()
                and (not isinstance(declared, KernelEntry) or all(map(self.find, SharedKernel.instances)))
            ):
                address = self._load_stored(declared)
            if address:
                self.addresses[declared] = address
        return self.addresses.get(declared, 0)

    def _load_stored(self, declared: Compilable) -> int:
        facts = describe_code(declared)
        name = object_name(declared.qualified_name.replace(":", "."), facts)
        if stored := self.store.load(name, facts):
            self.mark_used()
            try:
                return _load(declared, self.link(name, facts, stored))
            except OSError:  # the seal is valid, but the system cannot load it
                self.store.discard(name)
        return 0

    def link(self, name: str, facts: str, code: bytes | memoryview) -> bytes | memoryview:
        """Link an object file that could not be linked before.

        LLVM could load it as it is, but takes 48 MB.
        """
        if is_library(code):
            return code
        from llamatrain.compiler.link import link_if_possible

        if not is_library(library := link_if_possible(bytes(code))):
            return code
        if not self.relinking_announced:
            self.relinking_announced = True
            self.log(
                f"linking kernels that could not be linked when they were compiled (kept in {self.store.folder})"
            )
        self.save(name, seal(facts, library))
        return library

    def mark_used(self) -> None:
        """Mark the cache folder as used, once."""
        if not self.use_marked and self.store.folder:
            self.use_marked = True
            mark_used(self.store.folder)

    # ---- compiling --------------------------------------------

    def compile(self, declared: Compilable) -> int:
        """Compile a function in this process."""
        for kernel in SharedKernel.instances if isinstance(declared, KernelEntry) else ():
            self.get_address(kernel)
        self.announce()
        start = time.perf_counter()
        name, facts, code = compile_function(declared)
        self.save(name, seal(facts, code))
        self.add_to_report(1, time.perf_counter() - start)
        self.addresses[declared] = _load(declared, code)
        return self.addresses[declared]

    def save(self, name: str, file: bytes) -> None:
        """Save a sealed object file; print a line if it cannot be written."""
        before = self.store.problem
        self.store.save(name, file)
        if self.store.problem != before:
            self.log(
                f"kernels are kept for this run alone: {self.store.problem}; {CACHE_VARIABLE} names another folder"
            )

    def announce(self) -> None:
        """Print once that kernels are compiled, and where they are stored."""
        if self.announced:
            return
        self.announced = True
        self.store.check_writable()
        if self.store.folder and not self.store.problem:
            prune(self.store.folder.parent, self.store.folder.name)
        if self.store.problem:
            self.log(
                f"compiling kernels for this run alone: {self.store.problem}; {CACHE_VARIABLE} names another folder"
            )
        elif self.store.damaged:
            self.log(f"compiling kernels again that were damaged in {self.store.folder}")
        elif self.store.fallback_reason:
            reason = f"since {self.store.fallback_reason}; {CACHE_VARIABLE} names another folder"
            self.log(f"compiling kernels for this machine, once (kept in {self.store.folder}, {reason})")
        else:
            self.log(f"compiling kernels for this machine, once (kept in {self.store.folder})")

    def add_to_report(self, kernels: int, seconds: float) -> None:
        """Count compiled kernels and their seconds."""
        self.compiled, self.seconds = self.compiled + kernels, self.seconds + seconds

    def report(self) -> None:
        """Print how long compilation took, if anything was compiled since the last report."""
        if self.compiled:
            self.log(f"compiled {self.compiled} kernel{'s' * (self.compiled > 1)} in {self.seconds:.1f} s")
        self.compiled, self.seconds = 0, 0.0


def _load(declared: Compilable, code: bytes | memoryview) -> int:
    return load_code(code, declared.symbol if isinstance(declared, SharedKernel) else "")(declared.symbol)


def compile_function(declared: Compilable) -> tuple[str, str, bytes]:
    """Compile a function; return its name, its description and its code."""
    try:
        from llamatrain.compiler.emit import emit_object
        from llamatrain.compiler.link import link_if_possible
    except Exception as error:  # it is installed, but not compatible with other packages
        raise CompilerError(
            f"the installed compiler does not work ({error}); {INSTALL_HINT}", code="broken-compiler"
        ) from error

    facts = describe_code(declared)
    return (
        object_name(declared.qualified_name.replace(":", "."), facts),
        facts,
        link_if_possible(emit_object(declared)),
    )


def find_missing(needed: Iterable[Compilable]) -> list[Compilable]:
    """Return the functions that must be compiled, with the shared kernels that entries call."""
    wanted = dict.fromkeys(needed)
    if any(
        isinstance(function, KernelEntry) and not code_cache.library(function.symbol) for function in wanted
    ):
        wanted = dict.fromkeys([*SharedKernel.instances, *wanted])
    return [function for function in wanted if not code_cache.find(function)]


code_cache = CodeCache()
