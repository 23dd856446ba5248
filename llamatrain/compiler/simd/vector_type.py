"""Vectors as Numba types, with operators and functions."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, models, register_model

from llamatrain.compiler.simd import llvm_ops as W


class Lanes(types.Type):
    """A vector type of LLVM; numbers of the types `scalars` may be operands."""

    def __init__(self, name: str, element: Any, count: int, scalars: Sequence[types.Type]) -> None:
        self.llvm, self.scalars = ir.VectorType(element, count), scalars
        super().__init__(name)


@register_model(Lanes)
class LanesModel(models.PrimitiveModel):
    """Stores a vector as LLVM's vector."""

    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, kind.llvm)


def define_operators(kind: Lanes, flags: Sequence[str] = (), **instructions: str) -> None:
    """Define Python's operators and their in-place forms by instructions of LLVM.

    The keys of `instructions` are names in the module `operator`.
    """
    for name, instruction in instructions.items():
        for operator_name in (name, "i" + name.rstrip("_")):
            _define_operator(
                getattr(operator, operator_name), instruction, kind, {"flags": flags} if flags else {}
            )


def _define_operator(
    operation: Callable[..., Any], instruction: str, kind: Lanes, options: dict[str, Any]
) -> None:
    pairs = [
        (kind, kind),
        *((kind, scalar) for scalar in kind.scalars),
        *((scalar, kind) for scalar in kind.scalars),
    ]

    @infer_global(operation)
    class Operator(ConcreteTemplate):
        cases = tuple(signature(kind, *pair) for pair in pairs)

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*(W.splat(builder, arg, kind.llvm) for arg in args), **options)

    for pair in pairs:
        lower_builtin(operation, *pair)(lower)


def define_function(result: Any, argument: Any, generate: Callable[[Any, Any], Any]) -> Any:
    """Return `generate(builder, value)` as a function of one value."""

    @intrinsic
    def call(typing_context: Any, x: Any) -> Any:
        return result(argument), lambda context, builder, sig, args: generate(builder, *args)

    return call


def define_overloaded(kind: Lanes, number: types.Type, generate: Callable[[Any, Any], Any]) -> Any:
    """Return `generate(builder, value)` as a function of a vector or of a number."""

    @intrinsic
    def call(typing_context: Any, x: Any) -> Any:
        given = x if x == kind else number
        return given(given), lambda context, builder, sig, args: generate(builder, args[0])

    return call


def define_extreme(kind: Lanes, relation: str, flags: Sequence[str] = ()) -> Any:
    """Return a function that gives x in lanes where it is in this relation to y, else y (also for NaN)."""
    options = {"flags": flags} if flags else {}

    @intrinsic
    def call(typing_context: Any, x: Any, y: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            x, y = (W.splat(builder, arg, kind.llvm) for arg in args)
            return builder.select(builder.fcmp_ordered(relation, x, y, **options), x, y)

        return kind(kind, y), generate

    return call


def define_reduction(kind: Lanes, name: str, *start: float, flags: set[str]) -> Any:
    """Return a reduction of all lanes. The compiler chooses the order of a sum, always the same."""
    return define_function(
        types.float32, kind, lambda builder, x: W.reduce_lanes(builder, name, x, start, flags)
    )
