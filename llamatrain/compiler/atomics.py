"""Intrinsics for the thread pool: calls by address, atomic words, and spinning."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

WORD, VOID = ir.IntType(64), ir.VoidType()
ENTRY = ir.FunctionType(VOID, [WORD, WORD, WORD, WORD.as_pointer()])


@intrinsic
def call_entry(typing_context: Any, address: Any, lo: Any, hi: Any, thread: Any, args: Any) -> Any:
    """Call a kernel entry at an address: (address, lo, hi, thread, args)."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        words = builder.inttoptr(values[4], WORD.as_pointer())
        builder.call(builder.inttoptr(values[0], ENTRY.as_pointer()), [*values[1:4], words])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@intrinsic
def fetch_add(typing_context: Any, address: Any, value: Any) -> Any:
    """Add to an atomic word and return its old value."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(values[0], WORD.as_pointer()), values[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def load(typing_context: Any, address: Any) -> Any:
    """Read an atomic word."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(values[0], WORD.as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def store(typing_context: Any, address: Any, value: Any) -> Any:
    """Write an atomic word."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.store_atomic(values[1], builder.inttoptr(values[0], WORD.as_pointer()), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def yield_processor(typing_context: Any) -> Any:
    """Let another thread run: there may be fewer processors than threads."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        name = "SwitchToThread" if "windows" in builder.module.triple else "sched_yield"
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def pause_spinning(typing_context: Any) -> Any:
    """Tell the processor that this is a spin loop."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if "x86" in builder.module.triple:
            spin = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(VOID, []), "llvm.x86.sse2.pause"
            )
            builder.call(spin, [])
        elif builder.module.triple.startswith(("aarch64", "arm64")):
            # a barrier takes about as long as `pause`; `yield` takes no time on most processors
            hint = ir.FunctionType(VOID, [ir.IntType(32)])
            barrier = cgutils.get_or_insert_function(builder.module, hint, "llvm.aarch64.isb")
            builder.call(barrier, [ir.Constant(ir.IntType(32), 15)])
        return context.get_dummy_value()

    return types.void(), generate
