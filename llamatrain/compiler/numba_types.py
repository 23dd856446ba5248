"""Numba types of what bodies name: helpers, pointers, numbers, shared kernels and lazy values."""

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.dispatcher import Dispatcher
from numba.core.registry import CPUDispatcher, cpu_target
from numba.core.typing.typeof import typeof_impl
from numba.extending import intrinsic

from llamatrain.compiler.declare import (
    ArrayArg,
    Float64Arg,
    Helper,
    LazyCompiled,
    Pointer,
    argument_kind,
    is_named_tuple,
    tuple_fields,
)

WORDS = types.CPointer(types.int64)


def resolve_type(value: Any) -> Any:
    """Return the Numba type of a value that may be new."""
    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
    return cpu_target.typing_context.resolve_value_type(value)


# ---- helpers ---------------------------------------------------------------


class HelperCode(CPUDispatcher):
    """Compiles a helper once for its argument types, not once for each literal in a call."""

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Return the template for types without literals."""
        plain = {name: types.unliteral(kind) for name, kind in kws.items()}
        return super().get_call_template(tuple(map(types.unliteral, args)), plain)


@cache
def make_dispatcher(helper: Helper) -> Dispatcher:
    """Return Numba's dispatcher of a helper."""
    options = {"fastmath": set(helper.fast) or False, "error_model": "numpy", "nopython": True, "_nrt": False}
    options |= {"boundscheck": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return HelperCode(helper.py_func, targetoptions=options)


@typeof_impl.register(Helper)
def _type_helper(value: Helper, context: Any) -> Any:
    return types.Dispatcher(make_dispatcher(value))


@typeof_impl.register(LazyCompiled)
def _type_lazy(value: LazyCompiled, context: Any) -> Any:
    return resolve_type(value.value)


# ---- words to what they stand for ------------------------------------------


def make_pointer_cast(element: str) -> Any:
    """Return an intrinsic that converts a word to a pointer."""

    @intrinsic
    def pointer(typing_context: Any, word: Any) -> Any:
        kind = types.CPointer(getattr(types, element))

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(kind))

        return kind(types.int64), generate

    return pointer


@intrinsic
def bits_to_float64(typing_context: Any, word: Any) -> Any:
    """Return the float64 whose bits are `word`."""
    return types.float64(types.int64), lambda context, builder, signature, args: builder.bitcast(
        args[0], ir.DoubleType()
    )


def make_call_by_name(symbol: str) -> Any:
    """Return an intrinsic that calls a shared kernel by its symbol; all integers come as one tuple."""

    @intrinsic
    def call(typing_context: Any, values: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            words = [
                context.cast(builder, word, kind, types.int64)
                for word, kind in zip(cgutils.unpack_tuple(builder, args[0]), values.types, strict=True)
            ]
            kind = ir.FunctionType(ir.VoidType(), [word.type for word in words])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, symbol), words)
            return context.get_dummy_value()

        return types.void(values), generate

    return call


# ---- arguments -------------------------------------------------------------


def numba_type(annotation: Any) -> Any:
    """Return the Numba type of an annotated argument."""
    if is_named_tuple(annotation):
        return types.NamedTuple(tuple(map(numba_type, tuple_fields(annotation))), annotation)
    match argument_kind(annotation):
        case Pointer(element=element):
            return types.CPointer(getattr(types, element))
        case Float64Arg():
            return types.float64
        case ArrayArg(element=element, axes=axes):
            return types.Array(getattr(types, element), axes, "C")
    return types.int64


class ArgReader:
    """Emits code that reads arguments from a block of words, in order."""

    def __init__(self, context: Any, builder: Any, words: Any) -> None:
        self.context, self.builder, self.words, self.index = context, builder, words, 0

    def rest_address(self) -> Any:
        """Return the address of the remaining words."""
        return self.builder.gep(self.words, [ir.Constant(ir.IntType(64), self.index)])

    def read_word(self) -> Any:
        """Read the next word."""
        word = self.builder.load(self.rest_address())
        self.index += 1
        return word

    def read_value(self, kind: Any) -> Any:
        """Read a value of a type."""
        if isinstance(kind, types.NamedTuple | types.NamedUniTuple):
            return self.context.make_tuple(self.builder, kind, [self.read_value(field) for field in kind])
        if isinstance(kind, types.Array):
            return self.read_array(kind)
        word = self.read_word()
        if isinstance(kind, types.CPointer):
            return self.builder.inttoptr(word, self.context.get_value_type(kind))
        return self.builder.bitcast(word, ir.DoubleType()) if kind == types.float64 else word

    def read_array(self, kind: Any) -> Any:
        """Read an array: its address and the length of each axis."""
        array = self.context.make_array(kind)(self.context, self.builder)
        size = self.context.get_abi_sizeof(self.context.get_data_type(kind.dtype))
        data = self.builder.inttoptr(self.read_word(), array.data.type)
        shape = [self.read_word() for _ in range(kind.ndim)]
        strides = [ir.Constant(ir.IntType(64), size)]
        for length in shape[:0:-1]:
            strides.insert(0, self.builder.mul(length, strides[0]))
        fields = {
            "shape": cgutils.pack_array(self.builder, shape),
            "strides": cgutils.pack_array(self.builder, strides),
        }
        for name, value in fields.items():
            setattr(array, name, value)
        array.data, array.itemsize = data, ir.Constant(ir.IntType(64), size)
        array.nitems = shape[0] if kind.ndim == 1 else self.builder.mul(*shape)
        return array._getvalue()
