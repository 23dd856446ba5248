"""The registry of compiled kernels: by op name and by what the arrays are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from llamatrain.compiler.declare import Call


class Array(Protocol):
    """The shape and type of an array, before it exists. bfloat16 is uint16."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of each dimension."""

    @property
    def dtype(self) -> np.dtype:
        """The type of an element."""

    @property
    def size(self) -> int:
        """The number of elements."""


# outs, ins (arrays, or Blocks), attributes, scratch memory, threads -> the calls that do it
Bind = Callable[[Sequence[np.ndarray], Sequence[Any], dict[str, Any], np.ndarray, int], list[Call]]
# outs, ins, attributes, threads -> bytes of scratch memory
Scratch = Callable[[Sequence[Array], Sequence[Array], dict[str, Any], int], int]
# outs, ins, attributes -> True if this kernel takes them
Takes = Callable[[Sequence[Array], Sequence[Array], dict[str, Any]], bool]


@dataclass(frozen=True)
class Binding:
    """A kernel's binder, its scratch rule, and its condition."""

    bind: Bind
    scratch: Scratch
    takes: Takes


BINDINGS: dict[str, Binding] = {}


def no_scratch(outs: Sequence[Array], ins: Sequence[Array], attrs: dict[str, Any], threads: int) -> int:
    """Return 0."""
    return 0


def all_float32(outs: Sequence[Array], ins: Sequence[Array], attrs: dict[str, Any]) -> bool:
    """Return True if all arrays are float32 or int32."""
    return all(array.dtype in (np.float32, np.int32) for array in (*outs, *ins))


def kernel(op: str, scratch: Scratch = no_scratch, takes: Takes = all_float32) -> Callable[[Bind], Bind]:
    """Register the binder of an op's compiled kernel."""

    def register(bind: Bind) -> Bind:
        BINDINGS[op] = Binding(bind, scratch, takes)
        return bind

    return register


BLOCK_COST = 16384  # element operations in a block: 2 to 5 microseconds


def items_per_block(cost: int) -> int:
    """Return how many items of this cost make a block; it does not depend on the number of threads."""
    return max(1, BLOCK_COST // max(1, cost))
