"""The door between the engine and whatever computes: what a program asks of its memory and of its kernels.

`kernels/reference/backend.py` and `kernels/cpu/backend.py` are the first two who answer. Nothing here says that memory can be
seen from Python: only `read` and `write` cross over, and what `grouped` gives may be captured once and launched many times.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from llamatrain.compiler.cache import code_cache
from llamatrain.errors import GraphError
from llamatrain.graph.tensor import Node, Tensor
from llamatrain.platform.cpu import processor

BACKENDS = ("cpu", "reference")
# A backend's own, opaque to the engine: memory that it took, a tensor's place in some, something to be done.
Memory = Any
View = Any
Call = Any


class Backend(Protocol):
    def allocate(self, size: int, within: Memory | None = None, start: int = 0) -> Memory:
        """So many bytes of zeroed, aligned memory; or a part of what is given, which is refused where it is too small."""

    def use_memory(self, tensor: Tensor, memory: Memory | View, changed: bool) -> Memory:
        """Memory for a tensor, if it fits, and can be written where it is to be `changed`: an array of the caller's, memory that
        `take` gave, or the place of a tensor of another program."""

    def view(self, memory: Memory, tensor: Tensor, offset: int, strides: Sequence[int]) -> View:
        """Where a tensor lies in some memory, in bytes; found once, when a program is bound."""

    def resident_bytes(self, sizes: Iterable[int]) -> int:
        """Of weights of such sizes that are only read, where their file is mapped: how many bytes are in memory at once."""

    def read(self, place: View) -> np.ndarray:
        """What lies there, not to be written to; valid until the next run."""

    def write(self, place: View, values: Any, at: Any = ...) -> None:
        """Put values there, or into a part of it; a number fills it."""

    def is_finite(self, place: View, masks: bool = False) -> bool:
        """Whether no element is NaN or an infinity; with `masks`, minus infinity may stand there."""

    def has_kernel(self, node: Node) -> bool:
        """Whether there is a kernel of its own for this node; without, it is done by its definition."""

    def scratch(self, node: Node) -> int:
        """Bytes that its kernel needs beside the outputs."""

    def bind(self, node: Node, outs: Sequence[View], ins: Sequence[View], scratch: Memory) -> list[Call]:
        """What is to be done to compute the node there."""

    def batch(self, calls: Iterable[Call]) -> list[Callable[[], None]]:
        """Calls of many nodes, in their order, as few things that run."""

    def compile(self, runs: Iterable[Callable[[], None]]) -> None:
        """Have all there that these need to run, such as compiled code."""


def is_compiled(kernels: str) -> bool:
    """Whether kernels that are asked for by this name are compiled ones."""
    if kernels not in BACKENDS:
        raise GraphError(f"kernels are {' or '.join(BACKENDS)}; received {kernels!r}")
    return kernels == "cpu" and code_cache.is_available()


def kernel_class(kernels: str) -> str:
    """What tells their results from those of others, to the bit: the class of processors that they were compiled for."""
    return processor().name if is_compiled(kernels) else "numpy"


def create_backend(kernels: str = "cpu", threads: int = 1, drops: bool = False) -> Backend:
    """The backend of that name. With `drops`, pages of mapped files leave memory after each reading."""
    if threads < 1:
        raise GraphError(f"threads are 1 or more; received {threads}")
    if not is_compiled(kernels):
        from llamatrain.kernels.reference.backend import ReferenceBackend

        return ReferenceBackend(threads, drops)
    from llamatrain.kernels.cpu.backend import CpuBackend

    return CpuBackend(threads, drops)
