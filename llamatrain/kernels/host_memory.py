"""Memory of this machine, as arrays: what the backends that compute here have in common."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from llamatrain.errors import GraphError
from llamatrain.graph.tensor import QuantizedType, Tensor
from llamatrain.io.madvise import find_mapping, release_pages
from llamatrain.kernels.quantized import Blocks
from llamatrain.platform.memory import ALIGNMENT, allocate

CHECKED_ELEMENTS = 1 << 21  # elements of a quantised weight that are looked at together


class HostMemory:
    """Memory is a row of bytes; a place in it an array, or the blocks of a quantised weight."""

    def __init__(self, threads: int = 1, drop_pages: bool = False) -> None:
        """With `drops`, pages of mapped files leave memory after each reading: they wait in the system's cache for the next."""
        self.threads, self.drop_pages = threads, drop_pages

    # ---- memory ------------------------------------------------------------

    def allocate(self, size: int, within: np.ndarray | None = None, start: int = 0) -> np.ndarray:
        if within is None:
            return allocate(size)
        if (
            within.dtype != np.uint8
            or within.ndim != 1
            or not within.flags.c_contiguous
            or not within.flags.writeable
        ):
            raise GraphError(
                f"an arena is a row of bytes that can be written; received {within.dtype}{list(within.shape)}"
            )
        if within.size < start + size or (size and within.ctypes.data % ALIGNMENT):
            raise GraphError(
                f"the plan needs an arena of {size:,} bytes, aligned to {ALIGNMENT}; received {within.size:,} bytes"
            )
        return within[start : start + size]

    def use_memory(self, tensor: Tensor, memory: np.ndarray, changed: bool) -> np.ndarray:
        """An array like the tensor, or a row of bytes that `take` gave; nothing is copied."""
        taken = memory.dtype == np.uint8 and memory.shape == (tensor.nbytes,)
        like = memory.shape == tensor.dtype.storage_shape(tensor.shape) and memory.dtype == tensor.dtype.numpy
        if not (taken or like) or not memory.flags.c_contiguous:
            raise GraphError(
                f"{tensor!r} was given an array of {memory.dtype}{list(memory.shape)} with strides {memory.strides}"
            )
        if changed and not memory.flags.writeable:
            raise GraphError(
                f"{tensor!r} is changed by the program, but was given an array that cannot be written"
            )
        return memory.reshape(-1).view(np.uint8)

    def view(
        self, memory: np.ndarray, tensor: Tensor, offset: int, strides: Sequence[int]
    ) -> np.ndarray | Blocks:
        if isinstance(tensor.dtype, QuantizedType):
            return Blocks(
                tensor.dtype.kind, tensor.shape, memory.reshape(tensor.dtype.storage_shape(tensor.shape))
            )
        if tensor.size == 0:
            return np.zeros(tensor.shape, tensor.dtype.numpy)
        return np.ndarray(tensor.shape, tensor.dtype.numpy, memory, offset, strides)

    def resident_bytes(self, sizes: Iterable[int]) -> int:
        return max(sizes, default=0) if self.drop_pages else sum(sizes)

    # ---- what lies there ---------------------------------------------------

    def read(self, place: np.ndarray | Blocks) -> np.ndarray:
        seen: np.ndarray = _array(place)[...]
        seen.flags.writeable = False
        return seen

    def write(self, place: np.ndarray | Blocks, values: Any, at: Any = ...) -> None:
        _array(place)[at] = values

    def is_finite(self, place: np.ndarray | Blocks, masks: bool = False) -> bool:
        return all(_is_finite(piece, masks) for piece in _decoded_chunks(place))

    def release_calls(self, places: Sequence[np.ndarray | Blocks]) -> list[Any]:
        """Calls that drop the pages of what was read of mapped files, but for what is small."""
        arrays = (_array(place) for place in places) if self.drop_pages else ()
        return [
            partial(release_pages, array)
            for array in arrays
            if array.ndim > 1 and find_mapping(array) is not None
        ]


def _array(place: np.ndarray | Blocks) -> np.ndarray:
    return place.raw if isinstance(place, Blocks) else place


def _is_finite(array: np.ndarray, masks: bool) -> bool:
    if array.dtype == np.int32:
        return True
    if array.dtype == np.uint16:  # bfloat16: all bits of the exponent
        return not np.any((array & np.uint16(0x7F80)) == 0x7F80)
    return bool(np.all(array < np.inf if masks else np.isfinite(array)))


def _decoded_chunks(place: np.ndarray | Blocks) -> Iterator[np.ndarray]:
    """The array; of a quantised weight some rows at a time, decoded."""
    if not isinstance(place, Blocks):
        yield place
        return
    step = max(1, CHECKED_ELEMENTS // place.shape[1])
    for first in range(0, place.shape[0], step):
        yield place.decode_rows(np.s_[first : first + step])
