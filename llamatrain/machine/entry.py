"""What is compiled, each thing when it is first asked for: entries of programs, the bricks they call, functions for Python.

An entry is compiled to `void (lo, hi, thread, words)`: it does items lo to hi of a job whose arrays and numbers stand in a
block of 64-bit words. One shape for all of them means that a list of calls is data (see `machine/threads.py`), that nothing
is dispatched on types, and that an entry compiles once and in a fraction of a second. Its body names what the words are.
"""

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import zip_longest
from typing import Annotated, Any, ClassVar, NamedTuple

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from llamatrain.machine.jit import MachineCode, compiler

POINTER = types.CPointer(types.int64)
ENTRY = types.void(types.int64, types.int64, types.int64, POINTER)
WORDS = "words"  # what no argument may be called


class Brick:
    """A function of integers, giving none, that entries call by name: compiled once, not into each of them.

    `brick.call` is that call for compiled code; it takes all the integers as one tuple.
    """

    made: ClassVar[list["Brick"]] = []

    def __init__(self, body: Callable[..., None]) -> None:
        self.body, self.symbol = body, f"llamatrain_{body.__name__}"
        self.signature = types.void(*[types.int64] * body.__code__.co_argcount)
        self.compiled: MachineCode | None = None
        self.call = self._by_name()
        self.made.append(self)

    def ready(self) -> bool:
        """Whether it need not be compiled; then it is known to the linker from here on."""
        if self.compiled is None and (found := compiler.found_entry(self.body, self.signature)):
            self._link(found)
        return self.compiled is not None

    def link(self) -> None:
        if not self.ready():
            self._link(compiler.entry(self.body, self.signature))

    def _link(self, code: MachineCode) -> None:
        self.compiled = code
        llvm.add_symbol(self.symbol, code.address)

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
    """A module's function of the body's name, compiled when it is first asked for, unless it was: here, or elsewhere
    (`machine/ahead.py`), or by another run."""

    def __init__(self, body: Callable[..., Any]) -> None:
        self.body, self.name = body, body.__name__

    @property
    def where(self) -> str:
        return f"{self.body.__module__}:{self.name}"

    @cached_property
    def compiled(self) -> Any:
        return self.build()

    def ready(self) -> bool:
        """Whether it need not be compiled."""
        if "compiled" not in vars(self) and (found := self.found()):
            vars(self)["compiled"] = found
        return "compiled" in vars(self)

    def found(self) -> Any:
        """What was compiled before, if it was."""
        raise NotImplementedError

    def build(self) -> Any:
        """What was compiled before, or now."""
        raise NotImplementedError


class Function(Deferred):
    """A function that Python calls, of these types."""

    def __init__(self, body: Callable[..., Any], signature: Any, **how: bool) -> None:
        super().__init__(body)
        self.signature, self.how = signature, how

    def found(self) -> Any:
        return compiler.found_function(self.signature, self.body, **self.how)

    def build(self) -> Any:
        return self.found() or compiler.function(self.signature, self.body, **self.how)


def function(signature: Any, **how: bool) -> Callable[[Callable[..., Any]], Function]:
    return lambda body: Function(body, signature, **how)


class Entry(Deferred):
    """A kernel's body `(lo, hi, thread, ...)`. Each further argument is a word: an integer or an address as it is, or what its
    annotation makes of it: a pointer (F32 and its like) or a number (Real). A named tuple is some words with names of their
    own; `*rest` are the words that are left."""

    def __init__(self, body: Callable[..., None]) -> None:
        super().__init__(body)
        own = list(inspect.signature(body).parameters.values())[3:]
        self.arguments = inspect.Signature(own)
        self.kinds = [kind for each in own for kind in _kinds(each.annotation)]

    def found(self) -> MachineCode | None:
        """Without the bricks that it may call, it cannot be loaded."""
        return compiler.found_entry(self.body, ENTRY) if all(brick.ready() for brick in Brick.made) else None

    def build(self) -> MachineCode:
        for brick in Brick.made:
            brick.link()
        return self.found() or compiler.entry(self.body, ENTRY, self.of_words)

    def of_words(self) -> Callable[..., None]:
        """The body as a function `(lo, hi, thread, words)`: statements before it make its arguments of the words."""
        (function,) = ast.parse(_source(self.body)).body
        own = [each.arg for each in function.args.args] if isinstance(function, ast.FunctionDef) else []
        if not isinstance(function, ast.FunctionDef) or own != list(inspect.signature(self.body).parameters)[: len(own)]:
            raise RuntimeError(f"{inspect.getfile(self.body)} is not what it was when it was imported")
        words = ast.copy_location(ast.arg(WORDS), function)
        function.decorator_list, function.args.args, function.args.vararg = [], [*function.args.args[:3], words], None
        function.body[:0] = ast.parse("\n" * (function.lineno - 1) + "; ".join(self._unpacking())).body
        names = {**self.body.__globals__, "after": after, **{f"kind_{at}": kind for at, kind in enumerate(self.kinds)}}
        names |= {f"some_{each.name}": each.annotation for each in self.arguments.parameters.values()}
        exec(compile(ast.Module([function], []), inspect.getfile(self.body), "exec"), names)
        return names[self.name]

    def _unpacking(self) -> Iterator[str]:
        at = 0
        for each in self.arguments.parameters.values():
            if each.kind is each.VAR_POSITIONAL:
                yield f"{each.name} = after({WORDS}, {at})"
                return
            count = len(_kinds(each.annotation))
            parts = [f"kind_{i}({WORDS}[{i}])" if self.kinds[i] else f"{WORDS}[{i}]" for i in range(at, at + count)]
            yield f"{each.name} = " + (f"some_{each.name}({', '.join(parts)})" if _is_named_tuple(each.annotation) else parts[0])
            at += count

    @property
    def address(self) -> int:
        return int(self.compiled.address)

    def call(self, *args: Any, items: int, block: int, **named: Any) -> "Call":
        """One row of a program: this entry over `items`, `block` at a time, with these arrays and numbers."""
        try:
            given = self.arguments.bind(*args, **named).args
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}") from None
        values = [part for value in given for part in (value if isinstance(value, tuple) else (value,))]
        words = [_word(value, kind, self.name) for value, kind in zip_longest(values, self.kinds)]
        return Call(entry=self, words=np.array(words or [0], np.int64), items=items, block=max(1, block), kept=given)


class Call(NamedTuple):
    """An entry with its arguments laid out as words, arrays by address (and kept alive here)."""

    entry: Entry
    words: np.ndarray
    items: int
    block: int
    kept: tuple[Any, ...]


def _source(body: Callable[..., Any]) -> str:
    """A function's text, at its lines of the file. (inspect.getsource takes five times as long, to find where it ends.)"""
    code = body.__code__
    last = max(end or 0 for _, end, _, _ in code.co_positions())
    lines = linecache.getlines(code.co_filename, body.__globals__)[code.co_firstlineno - 1 : last]
    return "\n" * (code.co_firstlineno - 1) + textwrap.dedent("".join(lines) if last else inspect.getsource(body))


def _is_named_tuple(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, tuple)


def _kinds(annotation: Any) -> list[Any]:
    """What makes something of each word of an argument; None for what is left as it is."""
    if _is_named_tuple(annotation):
        return [kind for each in annotation.__annotations__.values() for kind in _kinds(each)]
    return list(getattr(annotation, "__metadata__", (None,)))


def _word(value: Any, kind: Any, name: str) -> int:
    if isinstance(value, np.ndarray) and kind is not real:
        if not value.flags.c_contiguous:
            raise ValueError(f"{name} was given an array with strides {value.strides}")
        return int(value.ctypes.data)
    if kind is real:
        return int(np.float64(value).view(np.int64))
    if isinstance(value, float | np.floating):
        raise TypeError(f"{name} was given {value} where an integer or an array belongs")
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


f32, f64 = _pointer_to(types.float32), _pointer_to(types.float64)
u8, u16 = _pointer_to(types.uint8), _pointer_to(types.uint16)
i32, i64 = _pointer_to(types.int32), _pointer_to(types.int64)


@intrinsic
def after(typing_context: Any, words: Any, count: Any) -> Any:
    """A pointer to the words after the first `count`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]])

    return POINTER(POINTER, types.int64), generate


@intrinsic
def real(typing_context: Any, word: Any) -> Any:
    """The float64 whose bits are `word`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), generate


# How an entry's arguments are annotated.
F32 = Annotated[Any, f32]
F64 = Annotated[Any, f64]
U8 = Annotated[Any, u8]
U16 = Annotated[Any, u16]
I32 = Annotated[Any, i32]
I64 = Annotated[Any, i64]
Real = Annotated[Any, real]
