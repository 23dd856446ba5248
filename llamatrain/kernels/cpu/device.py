"""The device of compiled kernels. Nodes that none takes use their reference kernel."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any

import numpy as np

from llamatrain.compiler import thread_pool as team
from llamatrain.errors import GraphError
from llamatrain.graph.fuse import fuse_adapter_sums
from llamatrain.graph.tensor import Node, PackedType, QuantizedType, Tensor
from llamatrain.kernels.cpu.registry import BINDINGS, Binding
from llamatrain.kernels.quantized import Blocks, PackedWeight
from llamatrain.kernels.reference.device import ReferenceDevice
from llamatrain.platform.cpu import has_int8_products, processor


@dataclass(frozen=True)
class ArraySpec:
    """The shape and type of an array, for scratch rules in a plan."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)


class CpuDevice(ReferenceDevice):
    """Combines consecutive calls into a table that the thread pool runs without returning to Python."""

    name = "cpu"
    has_int8_products = has_int8_products()

    @property
    def kernel_class(self) -> str:
        """The processor class that the kernels are compiled for."""
        return processor().name

    def rewrite(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs with products of adapters that add to those of the base."""
        return fuse_adapter_sums(outputs)

    def has_kernel(self, node: Node) -> bool:
        """Return True if a compiled kernel takes the node."""
        return _find_binding(node) is not None

    def scratch(self, node: Node) -> int:
        """Return the bytes that the node's kernel needs."""
        found = _find_binding(node)
        return found.scratch(self.threads) if found else 0

    def bind(
        self, node: Node, outs: Sequence[np.ndarray], ins: Sequence[np.ndarray | Blocks], scratch: np.ndarray
    ) -> list[Any]:
        """Return the calls that compute a node."""
        found = _find_binding(node)
        if not found:
            return super().bind(node, outs, ins, scratch)
        if scratch.size < (needed := found.scratch(self.threads)):
            raise GraphError(
                f"{node!r} needs {needed} bytes of scratch memory, but {scratch.size} are planned; plan with this device's rule",
                code="scratch-too-small",
            )
        calls = found.binding.bind(outs, ins, node.attrs, scratch, self.threads)
        return [*calls, *self.release_calls(ins)]

    def batch(self, calls: Iterable[Any], record: bool = True) -> list[Callable[[], None]]:
        """Combine compiled calls into tables; others stay as they are."""
        runs: list[Callable[[], None]] = []
        for plain, group in groupby(calls, callable):
            if plain:
                runs.extend(group)
            else:
                runs.append(team.CallTable(list(group), self.threads))
        return runs

    def compile(self, runs: Iterable[Callable[[], None]]) -> None:
        """Compile or load the kernels of all tables."""
        for each in runs:
            if isinstance(each, team.CallTable):
                each.compile()


@dataclass(frozen=True)
class NodeBinding:
    """A node's compiled kernel, and the specs of what it writes and reads."""

    node: Node
    binding: Binding
    outs: list[Any]
    ins: list[Any]

    def scratch(self, threads: int) -> int:
        """Return the bytes that the kernel needs besides its outputs."""
        return self.binding.scratch(self.outs, self.ins, self.node.attrs, threads)


def _find_binding(node: Node) -> NodeBinding | None:
    """Return the compiled kernel that takes a node, or None."""
    binding = BINDINGS.get(node.op.name)
    if not binding:
        return None
    outs, ins = map(_array_spec, node.outputs), map(_array_spec, node.sources)
    found = NodeBinding(node, binding, list(outs), list(ins))
    return found if binding.takes(found.outs, found.ins, node.attrs) else None


def _array_spec(tensor: Tensor) -> ArraySpec | Blocks | PackedWeight:
    if isinstance(tensor.dtype, PackedType):
        return PackedWeight(tensor.shape)
    if isinstance(tensor.dtype, QuantizedType):
        return Blocks(tensor.dtype.kind, tensor.shape)
    return ArraySpec(tensor.shape, tensor.dtype.numpy)
