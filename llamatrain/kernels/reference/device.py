"""The reference device."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from llamatrain.gguf.quants.kinds import COMPILED
from llamatrain.graph.precision import Precision
from llamatrain.graph.tensor import Node, QuantizedType, Tensor
from llamatrain.kernels.host_memory import HostMemory
from llamatrain.kernels.quantized import Blocks
from llamatrain.kernels.reference.registry import KERNELS, run_kernel


class ReferenceDevice(HostMemory):
    """Runs every op by its definition in numpy."""

    name = "reference"
    precisions: Sequence[Precision] = ("f32", "bf16")
    has_int8_products = True

    @property
    def kernel_class(self) -> str:
        """Numpy: its results do not depend on the processor's class."""
        return "numpy"

    def can_decode(self, dtype: QuantizedType) -> bool:
        """Return True for the types that are decoded often enough to be worth it."""
        return dtype.kind.number in COMPILED

    def rewrite(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs as they are."""
        return list(outputs)

    def has_kernel(self, node: Node) -> bool:
        """Return True if the op has a kernel here."""
        return node.op.name in KERNELS

    def scratch(self, node: Node) -> int:
        """Return 0: numpy allocates what it needs."""
        return 0

    def temporaries(self, node: Node) -> int:
        """Return 0: what numpy allocates is not planned."""
        return 0

    def bind(
        self, node: Node, outs: Sequence[np.ndarray], ins: Sequence[np.ndarray | Blocks], scratch: np.ndarray
    ) -> list[Any]:
        """Return the calls that compute a node."""
        return [partial(run_kernel, node.op.name, outs, ins, node.attrs), *self.release_calls(ins)]

    def batch(self, calls: Iterable[Any], record: bool = True) -> list[Callable[[], None]]:
        """Return the calls as they are."""
        return list(calls)

    def compile(self, runs: Iterable[Callable[[], None]]) -> None:
        """Compile what the runs call, before the first of them starts."""
