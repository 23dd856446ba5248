"""A declared function to an object file: its body by Numba, and around it a function in C's manner that needs nothing else."""

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
from llamatrain.compiler.numba_types import WORDS, ArgReader, type_of
from llamatrain.compiler.simd import vec16  # noqa: F401  what pointers can do
from llamatrain.compiler.target import context, typing

LONG = ir.IntType(64)


@global_compiler_lock
def object_of(declared: Compilable) -> bytes:
    for each in LazyModule.made:  # Numba does not see what an import brings in the midst of its work
        import_module(each.__name__)
    made = compile_extra(typing(), context(), declared.body, arguments(declared), None, flags(declared), {})
    library = context().codegen().create_library(declared.symbol)
    module = library.create_ir_module(declared.symbol)
    surround(module, declared, made)
    library.add_linking_library(made.library)
    library.add_ir_module(module)
    library.finalize()
    whole = library._final_module
    keep_inside(whole, declared.symbol)
    context().codegen().optimise(whole)
    return context().codegen().object_of(whole)


def flags(declared: Compilable) -> Flags:
    made = Flags()
    made.nrt, made.error_model = False, "numpy"
    made.no_cpython_wrapper = made.no_cfunc_wrapper = made.no_compile = True
    made.fastmath = FastMathOptions(False if isinstance(declared, Function) else set(FAST))
    return made


def arguments(declared: Compilable) -> tuple[Any, ...]:
    """The body's, in Numba's types; those that are left over come as a pointer to their words."""
    own = [types.int64] * declared.own
    given = declared.arguments.parameters.values()
    return *own, *(WORDS if each.kind is each.VAR_POSITIONAL else type_of(each.annotation) for each in given)


def surround(module: Any, declared: Compilable, made: Any) -> None:
    """`void (lo, hi, thread, words)` of an entry, of a brick its integers, `void (words)` of what Python calls, results first."""
    kinds, word_block = made.signature.args, LONG.as_pointer()
    by_words = not isinstance(declared, Routine)
    taken = [LONG] * (declared.own if by_words else len(kinds)) + [word_block] * by_words
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), taken), declared.symbol)
    builder = ir.IRBuilder(function.append_basic_block())
    values = list(function.args)
    if by_words:
        words = values.pop()
        reader = ArgReader(context(), builder, words)
        parameters = list(declared.arguments.parameters.values())
        for each, kind in zip(parameters, kinds[declared.own :], strict=True):
            values.append(reader.rest() if each.kind is each.VAR_POSITIONAL else reader.value(kind))
    body = ir.Function(
        module, context().call_conv.get_function_type(made.fndesc.restype, kinds), made.fndesc.llvm_func_name
    )
    _, result = context().call_conv.call_function(builder, body, made.signature.return_type, kinds, values)
    if made.signature.return_type != types.none:
        parts = (
            cgutils.unpack_tuple(builder, result)
            if isinstance(made.signature.return_type, types.UniTuple)
            else [result]
        )
        for place, part in enumerate(parts):
            builder.store(part, builder.gep(words, [LONG(place)]))
    builder.ret_void()


def keep_inside(module: Any, symbol: str) -> None:
    """Nothing but this is seen from outside."""
    for each in (*module.functions, *module.global_variables):
        if not each.is_declaration and each.name != symbol:
            each.linkage = llvm.Linkage.internal
