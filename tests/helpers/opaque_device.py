"""A device whose memory Python cannot read, for tests: what assumes a host's memory fails on it."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from llamatrain.graph.precision import Precision
from llamatrain.graph.tensor import Node, QuantizedType, Tensor
from llamatrain.kernels.reference.device import ReferenceDevice

LIMIT = 1 << 30  # bytes of its memory


class Handle:
    """Memory, a view or a call of the device: nothing can be done with it but to give it back to the device."""

    def __init__(self, held: Any) -> None:
        self.__held = held

    @staticmethod
    def open(handle: "Handle") -> Any:
        """Return what a handle stands for; only the device may call this."""
        assert isinstance(handle, Handle), f"{type(handle).__name__} is not memory of the device"
        return handle.__held


class OpaqueDevice:
    """Computes with numpy on memory of its own, and launches all calls of a program as one."""

    name, is_host = "opaque", False
    kernel_class = "opaque"
    precisions: Sequence[Precision] = ("f32", "bf16")
    has_int8_products = reads_ahead = False

    def __init__(self) -> None:
        self.plain, self.launches, self.allocated = ReferenceDevice(), 0, 0

    def memory_limit(self) -> int:
        return LIMIT

    def peak_bytes(self) -> int:
        return self.allocated

    def allocate(self, size: int, within: Handle | None = None, start: int = 0) -> Handle:
        self.allocated += 0 if within else size
        return Handle(self.plain.allocate(size, Handle.open(within) if within else None, start))

    def upload(self, array: np.ndarray) -> Handle:
        self.allocated += array.nbytes
        return Handle(np.array(array))

    def use_memory(self, tensor: Tensor, memory: np.ndarray | Handle, changed: bool) -> Handle:
        held = memory.copy() if isinstance(memory, np.ndarray) else Handle.open(memory)
        return Handle(self.plain.use_memory(tensor, held, changed))

    def read_ahead_calls(self, weight: Handle, ends: Handle | None) -> list[Any]:
        return []

    def view(self, memory: Handle, tensor: Tensor, offset: int, strides: Sequence[int]) -> Handle:
        return Handle(self.plain.view(Handle.open(memory), tensor, offset, strides))

    def resident_bytes(self, sizes: Iterable[int]) -> int:
        return sum(sizes)

    def read(self, place: Handle) -> np.ndarray:
        return self.plain.read(Handle.open(place)).copy()

    def write(self, place: Handle, values: Any, at: Any = ...) -> None:
        self.plain.write(Handle.open(place), values, at)

    def is_finite(self, place: Handle, masks: bool = False) -> bool:
        return self.plain.is_finite(Handle.open(place), masks)

    def can_decode(self, dtype: QuantizedType) -> bool:
        return self.plain.can_decode(dtype)

    def rewrite(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        return list(outputs)

    def has_kernel(self, node: Node) -> bool:
        return True

    def scratch(self, node: Node) -> int:
        return 0

    def temporaries(self, node: Node) -> int:
        return 0

    def bind(
        self, node: Node, outs: Sequence[Handle], ins: Sequence[Handle], scratch: Handle
    ) -> list[Handle]:
        calls = self.plain.bind(
            node, [*map(Handle.open, outs)], [*map(Handle.open, ins)], Handle.open(scratch)
        )
        return [Handle(call) for call in calls]

    def batch(self, calls: Iterable[Handle], record: bool = True) -> list[Callable[[], None]]:
        recorded = [Handle.open(call) for call in calls]

        def launch() -> None:
            self.launches += 1
            for call in recorded:
                call()

        return [launch]

    def compile(self, runs: Iterable[Callable[[], None]]) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, moment: float) -> float:
        return moment
