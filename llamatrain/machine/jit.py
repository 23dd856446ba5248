"""The compiler behind the fast kernels: Numba, and a shelf of what it made before, which an edit of any kernel invalidates."""

import time
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import numba
from numba.core import sigutils
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock

from llamatrain.machine.cachefolder import SWITCH, wanted
from llamatrain.machine.kept import Shelf, name_of, sealed
from llamatrain.machine.native import cache_key, facts_of, packed, setup, unpacked
from llamatrain.machine.terminal import say

# Sums may be regrouped and products contracted, so that loops vectorise; infinities and NaN keep their meaning.
FAST = {"reassoc", "contract", "arcp", "nsz"}

# A helper that entries call: compiled into them.
inline = partial(numba.njit, error_model="numpy", fastmath=FAST, nogil=True)

# A part of one entry, under a name of its own: woven into it before anything is compiled, and so not compiled twice.
woven = partial(inline, inline="always")

BY_ADDRESS = {"called by address": True}


class MachineCode(NamedTuple):
    """A function that compiled code calls by its address."""

    address: int
    library: Any  # keeps it alive
    found: bool  # it was compiled before


class Compiler:
    """Counts and times compilations, and says once that the first run is at it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.compiled = 0
        self.said = False
        self.say: Callable[[str], None] = say

    @cached_property
    def shelf(self) -> Shelf:
        return Shelf(wanted(cache_key()))

    # ---- what was compiled before ------------------------------------------

    def found_entry(self, body: Callable[..., None], signature: Any) -> MachineCode | None:
        made = self._found(body, signature, BY_ADDRESS)
        return made and _by_address(made, found=True)

    def found_function(self, signature: Any, body: Callable[..., Any], **how: bool) -> Any:
        """The body as a function that Python calls, if it was compiled before."""
        if (made := self._found(body, signature, how)) is None:
            return None
        function = _declared(body, how)
        function.targetctx.insert_user_function(made.entry_point, made.fndesc, [made.library])
        function.add_overload(made)
        function.disable_compile()
        return function

    def _found(self, body: Callable[..., Any], signature: Any, how: dict[str, bool]) -> Any:
        setup()
        name, facts = _known_as(body, signature, how)
        if code := self.shelf.take(name, facts):
            try:
                return unpacked(code)
            except Exception:  # it is what was written, and yet of no use here
                self.shelf.drop(name)
        return None

    # ---- compiling ---------------------------------------------------------

    def entry(
        self, body: Callable[..., None], signature: Any, text: Callable[[], Callable[..., None]] | None = None
    ) -> MachineCode:
        """The body (or what `text` makes of it) as a function that compiled code calls."""

        def build() -> Any:
            options = {"error_model": "numpy", "fastmath": FAST}
            made: Any = CFunc(text() if text else body, sigutils.normalize_signature(signature), {}, options)
            return made._compile_uncached()

        return _by_address(self._built(build, body, signature, BY_ADDRESS), found=False)

    def function(self, signature: Any, body: Callable[..., Any], **how: bool) -> Any:
        """The body as a function that Python calls."""
        function = _declared(body, how)

        def build() -> Any:
            function.compile(signature)
            (made,) = function.overloads.values()
            return made

        self._built(build, body, signature, how)
        function.disable_compile()
        return function

    def _built(self, build: Callable[[], Any], body: Callable[..., Any], signature: Any, how: dict[str, bool]) -> Any:
        setup()
        self.announce()
        start = time.perf_counter()
        with global_compiler_lock:
            made = build()
        name, facts = _known_as(body, signature, how)
        if code := packed(made):
            self.keep(name, sealed(facts, code))
        self.count(1, time.perf_counter() - start)
        return made

    def keep(self, name: str, file: bytes) -> None:
        before = self.shelf.trouble
        self.shelf.put(name, file)
        if self.shelf.trouble != before:
            self.say(f"kernels are kept for this run alone: {self.shelf.trouble}; {SWITCH} names another folder")

    def announce(self) -> None:
        if self.said:
            return
        self.said = True
        self.shelf.check()
        if self.shelf.trouble:
            self.say(f"compiling kernels for this run alone: {self.shelf.trouble}; {SWITCH} names another folder")
        elif self.shelf.damaged:
            self.say(f"compiling kernels again that were damaged in {self.shelf.folder}")
        else:
            self.say(f"compiling kernels for this machine, once (kept in {self.shelf.folder})")

    def count(self, kernels: int, seconds: float) -> None:
        self.compiled, self.seconds = self.compiled + kernels, self.seconds + seconds

    def report(self) -> None:
        """Say how long it took, if anything was compiled since the last report."""
        if self.compiled:
            self.say(f"compiled {self.compiled} kernels in {self.seconds:.1f} s")
        self.compiled, self.seconds = 0, 0.0


def _known_as(body: Callable[..., Any], signature: Any, how: dict[str, bool]) -> tuple[str, str]:
    facts = facts_of(body, signature, how)
    return name_of(f"{body.__module__}.{body.__name__}", facts), facts


def _declared(body: Callable[..., Any], how: dict[str, bool]) -> Any:
    return numba.njit(nogil=True, **how)(body)


def _by_address(made: Any, found: bool) -> MachineCode:
    with global_compiler_lock:
        address = made.library.get_pointer_to_function(made.fndesc.llvm_cfunc_wrapper_name)
    return MachineCode(address, made.library, found)


compiler = Compiler()
