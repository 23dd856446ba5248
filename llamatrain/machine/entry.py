"""What is compiled, each thing when it is first asked for: entries of programs, the bricks they call, functions for Python.

An entry is a function compiled to `void (lo, hi, thread, args)`: it does items lo to hi of a job whose arrays and
numbers stand in `args`, a block of 64-bit words. One shape for all of them means that a list of calls is data (see
`machine/threads.py`), that nothing is dispatched on types, and that an entry compiles once and in a fraction of a second.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from llamatrain.machine.jit import compiler

WORDS = types.CPointer(types.int64)
ENTRY = types.void(types.int64, types.int64, types.int64, WORDS)


class Brick:
    """A function of integers, giving none, that entries call by name: compiled once, not into each of them.

    `brick.call` is that call for compiled code; it takes all the integers as one tuple.
    """

    made: ClassVar[list["Brick"]] = []

    def __init__(self, body: Callable[..., None]) -> None:
        self.body, self.symbol = body, f"llamatrain_{body.__name__}"
        self.signature = types.void(*[types.int64] * body.__code__.co_argcount)
        self.compiled: Any = None
        self.call = self._by_name()
        self.made.append(self)

    def link(self) -> None:
        """Have the compiled body known to the linker from here on."""
        if self.compiled is None:
            self.compiled = compiler.entry(self.body, self.signature)
            llvm.add_symbol(self.symbol, self.compiled.address)

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


class Deferred:
    """A module's function of the body's name, compiled when it is first asked for, here or (`machine/ahead.py`) elsewhere."""

    def __init__(self, body: Callable[..., Any]) -> None:
        self.body, self.name = body, body.__name__

    @property
    def where(self) -> str:
        return f"{self.body.__module__}:{self.name}"

    @cached_property
    def compiled(self) -> Any:
        return self.build()

    def build(self) -> Any:
        raise NotImplementedError


class Function(Deferred):
    """A function that Python calls, of these types."""

    def __init__(self, body: Callable[..., Any], signature: Any, **how: bool) -> None:
        super().__init__(body)
        self.signature, self.how = signature, how

    def build(self) -> Any:
        return compiler.function(self.signature, self.body, **self.how)


def function(signature: Any, **how: bool) -> Callable[[Callable[..., Any]], Function]:
    return lambda body: Function(body, signature, **how)


class Entry(Deferred):
    """A kernel body `(lo, hi, thread, args)`, compiled when its address is first asked for."""

    def build(self) -> Any:
        for brick in Brick.made:
            brick.link()
        return compiler.entry(self.body, ENTRY)

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
