"""Loads and stores vectors: arrays of float32, or of bfloat16 (uint16), converted on the way."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llamatrain.compiler.simd import llvm_ops as W
from llamatrain.compiler.simd.vector import VECTOR
from llamatrain.compiler.vectors import LANES


def _kind(pointer: Any) -> tuple[Any, int, bool]:
    """Return the vector type in memory, the element size, and whether it is bfloat16."""
    half = pointer.dtype == types.uint16
    return ir.VectorType(W.SHORT if half else W.FLOAT, LANES), 2 if half else 4, half


def _address(builder: Any, lanes: Any, pointer: Any, index: Any) -> Any:
    return W.pointer(builder, builder.gep(pointer, [index]), lanes)


@intrinsic
def load(typing_context: Any, pointer: Any, index: Any) -> Any:
    """Load a vector from an index on."""
    lanes, size, half = _kind(pointer)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value = builder.load(_address(builder, lanes, *args), align=size)
        return W.from_bf16(builder, value) if half else value

    return VECTOR(pointer, types.int64), generate


@intrinsic
def store(typing_context: Any, pointer: Any, index: Any, value: Any) -> Any:
    """Store a vector from an index on."""
    lanes, size, half = _kind(pointer)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value = W.to_bf16(builder, args[2]) if half else args[2]
        builder.store(value, _address(builder, lanes, *args[:2]), align=size)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, VECTOR), generate


@intrinsic
def load_until(typing_context: Any, pointer: Any, index: Any, end: Any) -> Any:
    """Load the elements from `index` on; lanes from `end` on are 0, and their memory is not read."""
    lanes, size, half = _kind(pointer)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        left = builder.sub(args[2], args[1])
        address = _address(builder, lanes, *args[:2])
        with builder.if_else(builder.icmp_signed(">=", left, left.type(LANES)), likely=True) as (whole, part):
            with whole:
                full, from_whole = builder.load(address, align=size), builder.block
            with part:
                there = W.first_lanes(builder, left, LANES)
                some, from_part = W.masked_load(builder, address, lanes, size, there), builder.block
        value = builder.phi(lanes)
        value.add_incoming(full, from_whole)
        value.add_incoming(some, from_part)
        return W.from_bf16(builder, value) if half else value

    return VECTOR(pointer, types.int64, types.int64), generate


@intrinsic
def store_until(typing_context: Any, pointer: Any, index: Any, end: Any, value: Any, past: Any) -> Any:
    """Store the lanes before `end`.

    If `past` is not 0, bypass the caches; then the address must be aligned to a register.
    """
    lanes, size, half = _kind(pointer)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        left = builder.sub(args[2], args[1])
        address = _address(builder, lanes, *args[:2])
        value = W.to_bf16(builder, args[3]) if half else args[3]
        with builder.if_else(builder.icmp_signed(">=", left, left.type(LANES)), likely=True) as (whole, part):
            with (
                whole,
                builder.if_else(builder.icmp_signed("!=", args[4], args[4].type(0))) as (streamed, kept),
            ):
                with streamed:
                    written = builder.store(value, address, align=size * LANES)
                    written.set_metadata("nontemporal", builder.module.add_metadata([W.INT(1)]))
                with kept:
                    builder.store(value, address, align=size)
            with part:
                W.masked_store(builder, value, address, size, W.first_lanes(builder, left, LANES))
        return context.get_dummy_value()

    return types.void(pointer, types.int64, types.int64, VECTOR, types.int64), generate
