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
class Outline:
    """An array as a scratch rule sees it, before there is one."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        return prod(self.shape)


class Compiled(ReferenceBackend):
    """Consecutive calls become one table that the thread team runs without coming back to Python."""

    def has_kernel(self, node: Node) -> bool:
        return _binding(node) is not None

    def scratch(self, node: Node) -> int:
        found = _binding(node)
        return found.scratch(*_seen(node), node.attrs, self.threads) if found else 0

    def bind(
        self, node: Node, outs: Sequence[np.ndarray], ins: Sequence[np.ndarray | Blocks], scratch: np.ndarray
    ) -> list[Any]:
        found = _binding(node)
        if not found:
            return super().bind(node, outs, ins, scratch)
        if scratch.size < (needed := self.scratch(node)):
            raise GraphError(
                f"{node!r} needs {needed} bytes of scratch memory, planned are {scratch.size}: plan with its backend's rule"
            )
        return [*found.bind(outs, ins, node.attrs, scratch, self.threads), *self.lets_go(ins)]

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


def _binding(node: Node) -> Binding | None:
    """The compiled kernel that takes this node, if any."""
    found = BINDINGS.get(node.op.name)
    return found if found and found.takes(*_seen(node), node.attrs) else None


def _seen(node: Node) -> tuple[list[Any], list[Any]]:
    return [_outline(tensor) for tensor in node.outputs], [_outline(tensor) for tensor in node.sources]


def _outline(tensor: Tensor) -> Outline | Blocks:
    if isinstance(tensor.dtype, QuantizedType):
        return Blocks(tensor.dtype.kind, tensor.shape)
    return Outline(tensor.shape, tensor.dtype.numpy)
