"""The interface between the engine and a backend: memory and kernels.

`kernels/reference/backend.py` and `kernels/cpu/backend.py` implement it. It does not assume that Python can
see the memory: only `read` and `write` copy to and from it, and the result of `batch` may be captured once
and launched many times.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from llamatrain.compiler.cache import code_cache
from llamatrain.errors import GraphError
from llamatrain.graph.tensor import Node, Tensor
from llamatrain.platform.cpu import processor

BACKENDS = ("cpu", "reference")
# Types of a backend, opaque to the engine: memory, the view of a tensor, a call.
Memory = Any
View = Any
Call = Any


class Backend(Protocol):
    """The interface that a backend implements: memory and kernels for programs."""

    def allocate(self, size: int, within: Memory | None = None, start: int = 0) -> Memory:
        """Return `size` zeroed, aligned bytes, or a part of `within`.

        Raise GraphError if that is too small.
        """

    def use_memory(self, tensor: Tensor, memory: Memory | View, changed: bool) -> Memory:
        """Return memory for a tensor: the caller's array, allocated memory, or another program's view.

        Raise GraphError if it does not fit, or if it is to be `changed` and is read-only.
        """

    def view(self, memory: Memory, tensor: Tensor, offset: int, strides: Sequence[int]) -> View:
        """Return the view of a tensor at an offset, in bytes. It is made once, when a program is bound."""

    def resident_bytes(self, sizes: Iterable[int]) -> int:
        """Return how many bytes of mapped, read-only weights of these sizes are resident at once."""

    def read(self, place: View) -> np.ndarray:
        """Return the contents as a read-only array, valid until the next run."""

    def write(self, place: View, values: Any, at: Any = ...) -> None:
        """Write values to a view or a part of it; a number fills it."""

    def is_finite(self, place: View, masks: bool = False) -> bool:
        """Return True if no element is NaN or infinite; with `masks`, minus infinity is allowed."""

    def has_kernel(self, node: Node) -> bool:
        """Return True if the backend has a kernel for this node; otherwise the reference kernel runs."""

    def scratch(self, node: Node) -> int:
        """Return the bytes that the node's kernel needs besides its outputs."""

    def bind(self, node: Node, outs: Sequence[View], ins: Sequence[View], scratch: Memory) -> list[Call]:
        """Return the calls that compute a node into `outs`."""

    def batch(self, calls: Iterable[Call]) -> list[Callable[[], None]]:
        """Combine the calls of many nodes, in order, into few callables."""

    def compile(self, runs: Iterable[Callable[[], None]]) -> None:
        """Compile or load everything that these callables need."""


def is_compiled(kernels: str) -> bool:
    """Return True if this backend name gives compiled kernels on this machine."""
    if kernels not in BACKENDS:
        raise GraphError(f"kernels must be {' or '.join(BACKENDS)} (got {kernels!r})", code="unknown-kernels")
    return kernels == "cpu" and code_cache.is_available()


def kernel_class(kernels: str) -> str:
    """Return a name for kernels that give the same bits: the processor class they are compiled for."""
    return processor().name if is_compiled(kernels) else "numpy"


def create_backend(kernels: str = "cpu", threads: int = 1, drops: bool = False) -> Backend:
    """Create a backend. With `drops`, pages of mapped files are released after each read."""
    if threads < 1:
        raise GraphError(f"threads must be at least 1 (got {threads})", code="invalid-threads")
    if not is_compiled(kernels):
        from llamatrain.kernels.reference.backend import ReferenceBackend

        return ReferenceBackend(threads, drops)
    from llamatrain.kernels.cpu.backend import CpuBackend

    return CpuBackend(threads, drops)
