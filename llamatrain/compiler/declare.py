"""Declarations of compiled functions: kernel entries, shared kernels, functions for Python, and helpers.

Nothing here needs the compiler (emit.py). A declared function is found in the prebuilt library or in the
cache, or compiled when it is first used (cache.py).

An entry is compiled to `void (lo, hi, thread, words)`: it processes the items lo to hi of a job whose arrays
and numbers are in a block of 64-bit words. Because all entries have this one signature, a list of calls is
data (thread_pool.py), nothing is dispatched on types, and an entry compiles once, in a fraction of a second.
The parameters of its body name the words.
"""

import ctypes
import inspect
from collections.abc import Callable
from functools import cached_property, partial
from importlib import import_module
from itertools import zip_longest
from types import ModuleType
from typing import Annotated, Any, ClassVar, NamedTuple, get_args, get_origin

import numpy as np

LOOKUP_MODULE = "llamatrain.compiler.parallel"  # finds declared functions
TYPES_MODULE = "llamatrain.compiler.numba_types"  # the Numba types of names in bodies

# Sums may be reordered and products contracted, so that loops vectorize; infinities and NaN keep their meaning.
FAST = frozenset({"reassoc", "contract", "arcp", "nsz"})


# ---- what only the compiler needs ------------------------------------


class LazyCompiled:
    """A value for compiled code that is built when it is first used."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self.build = build

    @cached_property
    def value(self) -> Any:
        """The value for compiled code."""
        return self.build()

    def __call__(self, *args: Any) -> Any:
        """Raise an error: only compiled code can call this."""
        raise TypeError("only compiled code can call this")


class LazyModule(ModuleType):
    """A module that is imported when one of its names is first used, or anything is compiled."""

    instances: ClassVar[list["LazyModule"]] = []

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.instances.append(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)


class Helper:
    """A function that entries call, compiled into them. Python can call it, too."""

    def __init__(
        self, body: Callable[..., Any], fast: frozenset[str] = FAST, inline_source: bool = False
    ) -> None:
        self.py_func, self.fast = body, fast
        self.targetoptions = {"inline": "always"} if inline_source else {}  # the attribute that Numba reads
        self.__doc__ = body.__doc__

    def __call__(self, *args: Any) -> Any:
        """Run the Python body."""
        return self.py_func(*args)


inline = Helper

# A part of one entry with its own name, inlined as source before anything is compiled, so that it compiles once.
inline_source = partial(Helper, inline_source=True)

# A helper with exact arithmetic, even if its caller's is relaxed.
exact = partial(Helper, fast=frozenset())


# ---- what the words of a call stand for ------------------------------------


class Pointer(LazyCompiled):
    """Words that are addresses. In a body, it converts a word to a pointer to its element type."""

    def __init__(self, element: str) -> None:
        super().__init__(lambda: import_module(TYPES_MODULE).make_pointer_cast(element))
        self.element = element


class Float64Arg(LazyCompiled):
    """Words that are the bits of a float64. In a body, it converts a word to a float64."""

    def __init__(self) -> None:
        super().__init__(lambda: import_module(TYPES_MODULE).bits_to_float64)


class ArrayArg:
    """A contiguous array of one or two axes: a word for its address and one for the length of each axis."""

    def __init__(self, element: str, axes: int = 1) -> None:
        self.element, self.axes, self.dtype = element, axes, np.dtype(element)


f32, f64, u8, u16, i32, i64 = map(Pointer, ("float32", "float64", "uint8", "uint16", "int32", "int64"))
real = Float64Arg()

# Annotations of arguments of entries and functions.
F32 = Annotated[Any, f32]
F64 = Annotated[Any, f64]
U8 = Annotated[Any, u8]
U16 = Annotated[Any, u16]
I32 = Annotated[Any, i32]
I64 = Annotated[Any, i64]
Real = Annotated[Any, real]
U8s = Annotated[Any, ArrayArg("uint8")]
U32s = Annotated[Any, ArrayArg("uint32")]
I32s = Annotated[Any, ArrayArg("int32")]
I64s = Annotated[Any, ArrayArg("int64")]
I64Rows = Annotated[Any, ArrayArg("int64", 2)]
Int = Annotated[Any, None]  # an integer result of a function


def argument_kind(annotation: Any) -> Any:
    """Return the kind of an annotated argument; None for an integer."""
    return getattr(annotation, "__metadata__", (None,))[0]


def is_named_tuple(annotation: Any) -> bool:
    """Return True if an annotation is a named tuple."""
    return isinstance(annotation, type) and issubclass(annotation, tuple)


def tuple_fields(annotation: Any) -> list[Any]:
    """Return the annotations of a named tuple's fields."""
    return list(annotation.__annotations__.values())


def argument_kinds(annotation: Any) -> list[Any]:
    """Return the kinds of an argument's words; a named tuple has several."""
    if is_named_tuple(annotation):
        return [kind for field in tuple_fields(annotation) for kind in argument_kinds(field)]
    return [argument_kind(annotation)]


# ---- what is compiled ------------------------------------


class Compilable:
    """A function of a module that is found or compiled when its address is first needed."""

    def __init__(self, body: Callable[..., Any]) -> None:
        self.body, self.name = body, body.__name__
        self.arguments = inspect.Signature(
            list(inspect.signature(body).parameters.values())[self.leading_arguments :]
        )

    leading_arguments = 0  # the number of arguments before the words

    @property
    def qualified_name(self) -> str:
        """The module and name of the function."""
        return f"{self.body.__module__}:{self.name}"

    @property
    def symbol(self) -> str:
        """The symbol in object files."""
        return self.qualified_name.replace(":", ".").replace("__main__", "main").replace(".", "_")

    @cached_property
    def address(self) -> int:
        """The address of the machine code; 0 if there is none and no compiler."""
        address: int = import_module(LOOKUP_MODULE).find_or_compile(self)
        return address


class Routine(Compilable):
    """A function of integers without a result."""

    @cached_property
    def native(self) -> Callable[..., None]:
        """The compiled function as a Python callable."""
        return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(self.arguments.parameters))(self.address)


class SharedKernel(Routine):
    """A routine that entries call by symbol: compiled once, not into each of them.

    In a body, `kernel.call` takes all integers as one tuple.
    """

    instances: ClassVar[list["SharedKernel"]] = []

    def __init__(self, body: Callable[..., None]) -> None:
        super().__init__(body)
        self.instances.append(self)

    @cached_property
    def call(self) -> LazyCompiled:
        """The call for compiled code."""
        return LazyCompiled(lambda: import_module(TYPES_MODULE).make_call_by_name(self.symbol))


class Function(Compilable):
    """A function that Python calls with arrays and integers; it returns nothing, an integer, or several."""

    @cached_property
    def kinds(self) -> list[list[Any]]:
        """The kinds of the words of each argument."""
        return [argument_kinds(each.annotation) for each in self.arguments.parameters.values()]

    @cached_property
    def result_count(self) -> int:
        """The number of integers that the function returns; -1 means None."""
        annotation = inspect.signature(self.body).return_annotation
        return (
            -1 if annotation is None else len(get_args(annotation)) if get_origin(annotation) is tuple else 1
        )

    @cached_property
    def native(self) -> Callable[..., None]:
        """The compiled function, which takes a block of words."""
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)

    def __call__(self, *args: Any) -> Any:
        """Run the compiled code, or the Python body if there is none."""
        if not self.address:
            with np.errstate(over="ignore"):
                return self.body(
                    *(value.arrays if isinstance(value, BoundArrays) else value for value in args)
                )
        words: list[int] = []
        for value, kinds in zip(args, self.kinds, strict=True):
            words += value.words if isinstance(value, BoundArrays) else _to_words(value, kinds)
        block = (ctypes.c_int64 * max(2, len(words)))(*words)
        self.native(block)
        return (
            None
            if self.result_count < 0
            else block[0]
            if self.result_count == 1
            else tuple(block[: self.result_count])
        )


class BoundArrays:
    """An array, or a named tuple of arrays, for repeated calls of functions: its words are made once."""

    def __init__(self, arrays: Any, annotation: Any) -> None:
        self.arrays, self.words = arrays, _to_words(arrays, argument_kinds(annotation))


class KernelEntry(Compilable):
    """The body `(lo, hi, thread, ...)` of a kernel.

    Each further argument is a word: an integer or address as it is, or what its annotation makes of it: a
    pointer (such as F32) or a number (Real). A named tuple stands for several words with names; `*rest` takes
    the remaining words.
    """

    leading_arguments = 3

    @cached_property
    def kinds(self) -> list[Any]:
        """The kinds of all words."""
        return [
            kind for each in self.arguments.parameters.values() for kind in argument_kinds(each.annotation)
        ]

    def call(self, *args: Any, items: int, block: int, **named: Any) -> "Call":
        """Return a call of this entry over `items` items, in blocks of `block`, with these arguments."""
        bound = self._arrange(args, named)
        values = [part for value in bound for part in (value if isinstance(value, tuple) else (value,))]
        words = [_to_word(value, kind, self.name) for value, kind in zip_longest(values, self.kinds)]
        return Call(
            entry=self,
            words=np.array(words or [0], np.int64),
            items=items,
            block=max(1, block),
            keep_alive=bound,
        )

    @cached_property
    def _names(self) -> list[str]:
        """The names of the parameters; none if one of them takes any number of arguments."""
        parameters = self.arguments.parameters
        return (
            [] if any(each.kind is each.VAR_POSITIONAL for each in parameters.values()) else list(parameters)
        )

    def _arrange(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """Return all arguments in the order of the parameters.

        `Signature.bind` does the same, and says what is wrong, but takes five times as long.
        """
        names = self._names[len(args) :]
        if len(args) + len(named) == len(self._names) and all(name in named for name in names):
            return (*args, *(named[name] for name in names))
        try:
            return self.arguments.bind(*args, **named).args
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}") from None


class Call(NamedTuple):
    """An entry with its arguments as words.

    `keep_alive` holds the arrays whose addresses are in the words.
    """

    entry: KernelEntry
    words: np.ndarray
    items: int
    block: int
    keep_alive: tuple[Any, ...]


def _to_word(value: Any, kind: Any, name: str) -> int:
    if isinstance(value, np.ndarray) and kind is not real:
        if not value.flags.c_contiguous:
            raise ValueError(f"{name} was given an array with strides {value.strides}")
        return int(value.ctypes.data)
    if kind is real:
        return int(np.float64(value).view(np.int64))
    if isinstance(value, float | np.floating):
        raise TypeError(f"{name} was given {value} where an integer or an array belongs")
    return int(value)


def _to_words(value: Any, kinds: list[Any]) -> list[int]:
    words: list[int] = []
    for part, kind in zip(value if isinstance(value, tuple) else (value,), kinds, strict=True):
        if not isinstance(kind, ArrayArg):
            words.append(int(part))
            continue
        if part.dtype != kind.dtype or part.ndim != kind.axes or not part.flags.c_contiguous:
            raise TypeError(
                f"an array of {kind.axes} axes of {kind.element} was asked for, not {part.ndim} of {part.dtype}"
            )
        words += (_address(part), *part.shape)
    return words


def _address(array: np.ndarray) -> int:
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]  # a fifth of the time
    except (TypeError, ValueError):  # the array is read-only or empty
        return int(array.ctypes.data)
