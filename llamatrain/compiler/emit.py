"""Compiles a declared function to an object file.

Numba compiles the body, and a wrapper gives it a C signature.
"""

from importlib import import_module
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.compiler import Flags, compile_extra
from numba.core.compiler_lock import global_compiler_lock
from numba.core.cpu import FastMathOptions

from llamatrain.compiler.declare import FAST, Compilable, Function, LazyModule, Routine
from llamatrain.compiler.numba_types import WORDS, ArgReader, numba_type
from llamatrain.compiler.simd import vec16  # noqa: F401  what pointers can do
from llamatrain.compiler.target import numba_context, typing_context

LONG = ir.IntType(64)


@global_compiler_lock
def emit_object(declared: Compilable) -> bytes:
    """Compile a function and return the object file."""
    for lazy_module in LazyModule.instances:  # Numba does not see what is imported while it works
        import_module(lazy_module.__name__)
    result = compile_extra(
        typing_context(),
        numba_context(),
        declared.body,
        argument_types(declared),
        None,
        compile_flags(declared),
        {},
    )
    library = numba_context().codegen().create_library(declared.symbol)
    module = library.create_ir_module(declared.symbol)
    add_wrapper(module, declared, result)
    library.add_linking_library(result.library)
    library.add_ir_module(module)
    library.finalize()
    final = library._final_module
    hide_symbols(final, declared.symbol)
    numba_context().codegen().optimize(final)
    return numba_context().codegen().emit_object(final)


def compile_flags(declared: Compilable) -> Flags:
    """Return Numba's flags for a function."""
    flags = Flags()
    flags.nrt, flags.error_model = False, "numpy"
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.no_compile = True
    flags.fastmath = FastMathOptions(False if isinstance(declared, Function) else set(FAST))
    return flags


def argument_types(declared: Compilable) -> tuple[Any, ...]:
    """Return the Numba types of the body's arguments; `*rest` is a pointer to its words."""
    leading = [types.int64] * declared.leading_arguments
    given = declared.arguments.parameters.values()
    return *leading, *(
        WORDS if parameter.kind is parameter.VAR_POSITIONAL else numba_type(parameter.annotation)
        for parameter in given
    )


def add_wrapper(module: Any, declared: Compilable, made: Any) -> None:
    """Add the exported function that reads the words and calls the body.

    Its signature is `void (lo, hi, thread, words)` for an entry, the integers for a shared kernel, and `void
    (words)`, with results first, for a function that Python calls.
    """
    kinds, word_block = made.signature.args, LONG.as_pointer()
    by_words = not isinstance(declared, Routine)
    parameter_types = [LONG] * (declared.leading_arguments if by_words else len(kinds)) + [
        word_block
    ] * by_words
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), parameter_types), declared.symbol)
    builder = ir.IRBuilder(function.append_basic_block())
    values = list(function.args)
    if by_words:
        words = values.pop()
        reader = ArgReader(numba_context(), builder, words)
        parameters = list(declared.arguments.parameters.values())
        for parameter, kind in zip(parameters, kinds[declared.leading_arguments :], strict=True):
            values.append(
                reader.rest_address()
                if parameter.kind is parameter.VAR_POSITIONAL
                else reader.read_value(kind)
            )
    body = ir.Function(
        module,
        numba_context().call_conv.get_function_type(made.fndesc.restype, kinds),
        made.fndesc.llvm_func_name,
    )
    _, result = numba_context().call_conv.call_function(
        builder, body, made.signature.return_type, kinds, values
    )
    if made.signature.return_type != types.none:
        parts = (
            cgutils.unpack_tuple(builder, result)
            if isinstance(made.signature.return_type, types.UniTuple)
            else [result]
        )
        for index, part in enumerate(parts):
            builder.store(part, builder.gep(words, [LONG(index)]))
    builder.ret_void()


def hide_symbols(module: Any, symbol: str) -> None:
    """Make all symbols but one internal, and number them: Numba's names depend on what was compiled before."""
    for number, value in enumerate((*module.functions, *module.global_variables)):
        if not value.is_declaration and value.name != symbol:
            value.linkage = llvm.Linkage.internal
            value.name = f"{symbol}.{number}"
