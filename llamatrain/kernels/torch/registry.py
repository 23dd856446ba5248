"""The registry of torch kernels, by op name.

A kernel is a function of tensors. It either returns its results, which are then copied to their place in the
arena, or it writes them: then it takes `out`, a tuple of the views it writes to.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llamatrain.graph.tensor import Node

Run = Callable[..., Any]
Temporaries = Callable[[Node], int]


@dataclass(frozen=True)
class TorchKernel:
    """A kernel, whether it writes its results itself, and the bytes that it allocates for a node."""

    run: Run
    writes: bool
    temporaries: Temporaries
    is_recordable: bool = True  # False: it waits for the device


KERNELS: dict[str, TorchKernel] = {}


def result_bytes(node: Node) -> int:
    """Return the bytes of all results."""
    return sum(output.nbytes for output in node.outputs)


def nothing(node: Node) -> int:
    """Return 0."""
    return 0


def kernel(temporaries: Temporaries = result_bytes) -> Callable[[Run], Run]:
    """Register a kernel that returns its results, under the name of its function."""

    def register(run: Run) -> Run:
        KERNELS[run.__name__] = TorchKernel(run, False, temporaries)
        return run

    return register


def writing_kernel(temporaries: Temporaries = nothing, is_recordable: bool = True) -> Callable[[Run], Run]:
    """Register a kernel that writes its results to `out`, under the name of its function."""

    def register(run: Run) -> Run:
        KERNELS[run.__name__] = TorchKernel(run, True, temporaries, is_recordable)
        return run

    return register
