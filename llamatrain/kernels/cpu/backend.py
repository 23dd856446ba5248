"""The backend of compiled kernels. What none of them takes is done by its plain definition."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any

import numpy as np

from llamatrain.compiler import thread_pool as team
from llamatrain.errors import GraphError
from llamatrain.graph.tensor import Node, QuantizedType, Tensor
from llamatrain.kernels.cpu.registry import BINDINGS, Binding
from llamatrain.kernels.quantized import Blocks
from llamatrain.kernels.reference.backend import ReferenceBackend


@dataclass(frozen=True)
class ArraySpec:
    """An array as a scratch rule sees it, before there is one."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        return prod(self.shape)


class CpuBackend(ReferenceBackend):
    """Consecutive calls become one table that the thread team runs without coming back to Python."""

    def has_kernel(self, node: Node) -> bool:
        return _find_binding(node) is not None

    def scratch(self, node: Node) -> int:
        binding = _find_binding(node)
        return binding.scratch(*_specs_of_node(node), node.attrs, self.threads) if binding else 0

    def bind(
        self, node: Node, outs: Sequence[np.ndarray], ins: Sequence[np.ndarray | Blocks], scratch: np.ndarray
    ) -> list[Any]:
        binding = _find_binding(node)
        if not binding:
            return super().bind(node, outs, ins, scratch)
        if scratch.size < (needed := self.scratch(node)):
            raise GraphError(
                f"{node!r} needs {needed} bytes of scratch memory, planned are {scratch.size}: plan with its backend's rule"
            )
        return [*binding.bind(outs, ins, node.attrs, scratch, self.threads), *self.release_calls(ins)]

    def batch(self, calls: Iterable[Any]) -> list[Callable[[], None]]:
        runs: list[Callable[[], None]] = []
        for plain, group in groupby(calls, callable):
            if plain:
                runs.extend(group)
            else:
                runs.append(team.CallTable(list(group), self.threads))
        return runs

    def compile(self, runs: Iterable[Callable[[], None]]) -> None:
        for each in runs:
            if isinstance(each, team.CallTable):
                each.compile()


def _find_binding(node: Node) -> Binding | None:
    """The compiled kernel that takes this node, if any."""
    binding = BINDINGS.get(node.op.name)
    return binding if binding and binding.takes(*_specs_of_node(node), node.attrs) else None


def _specs_of_node(node: Node) -> tuple[list[Any], list[Any]]:
    return [_array_spec(tensor) for tensor in node.outputs], [_array_spec(tensor) for tensor in node.sources]


def _array_spec(tensor: Tensor) -> ArraySpec | Blocks:
    if isinstance(tensor.dtype, QuantizedType):
        return Blocks(tensor.dtype.kind, tensor.shape)
    return ArraySpec(tensor.shape, tensor.dtype.numpy)
