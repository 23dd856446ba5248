"""The backend that does every op by its definition."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from llamatrain.graph.tensor import Node
from llamatrain.kernels.host_memory import HostMemory
from llamatrain.kernels.quantized import Blocks
from llamatrain.kernels.reference.registry import KERNELS, run_kernel


class ReferenceBackend(HostMemory):
    def has_kernel(self, node: Node) -> bool:
        return node.op.name in KERNELS

    def scratch(self, node: Node) -> int:
        return 0

    def bind(
        self, node: Node, outs: Sequence[np.ndarray], ins: Sequence[np.ndarray | Blocks], scratch: np.ndarray
    ) -> list[Any]:
        return [partial(run_kernel, node.op.name, outs, ins, node.attrs), *self.release_calls(ins)]

    def batch(self, calls: Iterable[Any]) -> list[Callable[[], None]]:
        return list(calls)

    def compile(self, runs: Iterable[Callable[[], None]]) -> None: ...
