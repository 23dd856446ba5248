"""Where machine code is found: in the library that came with the package, among what was compiled before, or made now."""

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
from llamatrain.compiler.loader import is_library, loaded
from llamatrain.compiler.store import ObjectStore, name_of, sealed
from llamatrain.errors import LlamatrainError
from llamatrain.platform.cache_dir import CACHE_VARIABLE, default_cache_dir, fallback_cache_dir
from llamatrain.platform.cache_prune import mark_used, prune
from llamatrain.platform.cpu import processor
from llamatrain.platform.terminal import say

COMPILERS = ("numba", "llvmlite")
HELP = "pip install 'llamatrain[compile]' brings a compiler"


@cache
def cache_key() -> str:
    """Of all that decides machine code: the sources, the class of the processor, the compiler."""
    made = [version_of(name) for name in COMPILERS] if compiles() else []
    return hashlib.sha256(
        repr((prebuilt.sources(), processor()[:3], sys.platform, made)).encode()
    ).hexdigest()[:16]


@cache
def compiles() -> bool:
    """Whether there is a compiler, and not just a folder of its name."""
    return all((spec := find_spec(name)) and spec.origin for name in COMPILERS)


def version_of(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def facts_of(declared: Compilable) -> str:
    """All that decides the code of a function, in a line."""
    body, own = declared.body, ""
    if not declared.where.startswith("llamatrain."):
        closure = [repr(cell.cell_contents) for cell in body.__closure__ or ()]
        own = repr((_stamp(body.__code__.co_filename), body.__code__.co_firstlineno, closure))
    return repr((cache_key(), declared.where, own))


@cache
def _stamp(source: str) -> str:
    return hashlib.sha256(Path(source).read_bytes()).hexdigest()


class CompilerError(LlamatrainError):
    """A compiler that does not work here."""


class CodeCache:
    """Finds and makes; counts and times what is made, and says so once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.compiled = 0
        self.said = self.noted = self.relinked = False
        self.trouble = ""  # with the library that should have come with the package
        self.say: Callable[[str], None] = say
        self.there: dict[Compilable, int] = {}
        self.idle = False
        self.passed: list[Compilable] = []  # that would have been compiled

    @cached_property
    def shelf(self) -> ObjectStore:
        return ObjectStore(default_cache_dir(cache_key()), fallback_cache_dir(cache_key()))

    @cached_property
    def library(self) -> Callable[[str], int]:
        found, self.trouble = prebuilt.library()
        if self.trouble and compiles():
            self.say(f"{self.trouble}; kernels are compiled")
        return found

    def able(self) -> bool:
        """Whether there are compiled kernels at all; where there are none, it is said once what would help."""
        if self.library is not prebuilt.nothing or compiles():
            return True
        if not self.said:
            self.said = True
            why = self.trouble or f"no compiled kernels for {processor().name}"
            self.say(f"{why}: numpy does their work, many times slower; {HELP}")
        return False

    def address(self, declared: Compilable) -> int:
        if self.idle and not self.found(declared):
            self.passed.append(declared)
            return 0
        return self.able() and (self.found(declared) or (compiles() and self.made(declared)))

    @contextmanager
    def finding(self) -> Iterator[None]:
        """Meanwhile nothing is compiled: what is not there is done in Python."""
        before, self.idle = self.idle, True
        try:
            yield
        finally:
            self.idle = before
            while self.passed:
                self.passed.pop().__dict__.pop(
                    "address", None
                )  # it may be compiled when it is asked for again

    def found(self, declared: Compilable) -> int:
        """The address of what need not be compiled; 0 if it must be. An entry is loaded with the bricks that it may call."""
        if declared not in self.there:
            address = self.library(declared.symbol)
            if (
                not address
                and compiles()
                and (not isinstance(declared, KernelEntry) or all(map(self.found, SharedKernel.made)))
            ):
                address = self._kept(declared)
            if address:
                self.there[declared] = address
        return self.there.get(declared, 0)

    def _kept(self, declared: Compilable) -> int:
        facts = facts_of(declared)
        name = name_of(declared.where.replace(":", "."), facts)
        if kept := self.shelf.take(name, facts):
            self.note_use()
            try:
                return _loaded(declared, self.linked(name, facts, kept))
            except OSError:  # it is what was written, and yet of no use here
                self.shelf.drop(name)
        return 0

    def linked(self, name: str, facts: str, code: bytes | memoryview) -> bytes | memoryview:
        """Link an object file that was kept because its linker failed: what loads it otherwise is LLVM, which takes 48 MB."""
        if is_library(code):
            return code
        from llamatrain.compiler.link import loadable

        if not is_library(made := loadable(bytes(code))):
            return code
        if not self.relinked:
            self.relinked = True
            self.say(
                f"linking kernels that could not be linked when they were compiled (kept in {self.shelf.folder})"
            )
        self.keep(name, sealed(facts, made))
        return made

    def note_use(self) -> None:
        if not self.noted and self.shelf.folder:
            self.noted = True
            mark_used(self.shelf.folder)

    # ---- compiling --------------------------------------------

    def made(self, declared: Compilable) -> int:
        """Compiled here and now."""
        for brick in SharedKernel.made if isinstance(declared, KernelEntry) else ():
            self.address(brick)
        self.announce()
        start = time.perf_counter()
        name, facts, code = compiled(declared)
        self.keep(name, sealed(facts, code))
        self.count(1, time.perf_counter() - start)
        self.there[declared] = _loaded(declared, code)
        return self.there[declared]

    def keep(self, name: str, file: bytes) -> None:
        before = self.shelf.trouble
        self.shelf.put(name, file)
        if self.shelf.trouble != before:
            self.say(
                f"kernels are kept for this run alone: {self.shelf.trouble}; {CACHE_VARIABLE} names another folder"
            )

    def announce(self) -> None:
        if self.said:
            return
        self.said = True
        self.shelf.check()
        if self.shelf.folder and not self.shelf.trouble:
            prune(self.shelf.folder.parent, self.shelf.folder.name)
        if self.shelf.trouble:
            self.say(
                f"compiling kernels for this run alone: {self.shelf.trouble}; {CACHE_VARIABLE} names another folder"
            )
        elif self.shelf.damaged:
            self.say(f"compiling kernels again that were damaged in {self.shelf.folder}")
        elif self.shelf.instead:
            why = f"since {self.shelf.instead}; {CACHE_VARIABLE} names another folder"
            self.say(f"compiling kernels for this machine, once (kept in {self.shelf.folder}, {why})")
        else:
            self.say(f"compiling kernels for this machine, once (kept in {self.shelf.folder})")

    def count(self, kernels: int, seconds: float) -> None:
        self.compiled, self.seconds = self.compiled + kernels, self.seconds + seconds

    def report(self) -> None:
        """Say how long it took, if anything was compiled since the last report."""
        if self.compiled:
            self.say(f"compiled {self.compiled} kernel{'s' * (self.compiled > 1)} in {self.seconds:.1f} s")
        self.compiled, self.seconds = 0, 0.0


def _loaded(declared: Compilable, code: bytes | memoryview) -> int:
    return loaded(code, declared.symbol if isinstance(declared, SharedKernel) else "")(declared.symbol)


def compiled(declared: Compilable) -> tuple[str, str, bytes]:
    """The code of a function, made now, with its name and all that decides it."""
    try:
        from llamatrain.compiler.emit import object_of
        from llamatrain.compiler.link import loadable
    except Exception as error:  # it is installed, and is not for what else is
        raise CompilerError(
            f"the compiler that is installed does not work ({error}); {HELP} that does"
        ) from error

    facts = facts_of(declared)
    return name_of(declared.where.replace(":", "."), facts), facts, loadable(object_of(declared))


def missing(needed: Iterable[Compilable]) -> list[Compilable]:
    """What must be compiled, each once, with the bricks that entries call."""
    wanted = dict.fromkeys(needed)
    if any(isinstance(each, KernelEntry) and not code.library(each.symbol) for each in wanted):
        wanted = dict.fromkeys([*SharedKernel.made, *wanted])
    return [each for each in wanted if not code.found(each)]


code = CodeCache()
