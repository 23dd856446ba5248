"""Host memory as numpy arrays, for the devices that compute on this machine."""

import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from llamatrain.errors import GraphError
from llamatrain.graph.tensor import PackedType, QuantizedType, Tensor
from llamatrain.io.madvise import find_mapping, release_pages, request_pages
from llamatrain.kernels.quantized import Blocks, PackedWeight
from llamatrain.platform.memory import ALIGNMENT, allocate

HostView = np.ndarray | Blocks | PackedWeight
CHECKED_ELEMENTS = 1 << 21  # elements of a quantized weight that are checked at a time


class HostMemory:
    """Memory is an array of bytes; a view in it is an array, or a quantized or packed weight."""

    is_host = True

    def __init__(self, threads: int = 1, drop_pages: bool = False, reads_ahead: bool = False) -> None:
        """Set the threads; with `drop_pages`, pages of mapped files are released after each read.

        They stay in the system's cache for the next read. With `reads_ahead`, they are requested before a read.
        """
        self.threads, self.drop_pages, self.reads_ahead = threads, drop_pages, reads_ahead

    # ---- memory ------------------------------------------------------------

    def memory_limit(self) -> int | None:
        """Return None: there is no other memory than the host's."""
        return None

    def peak_bytes(self) -> int | None:
        """Return None: there is no other memory than the host's."""
        return None

    def upload(self, array: np.ndarray) -> np.ndarray:
        """Return the array itself."""
        return array

    def allocate(self, size: int, within: np.ndarray | None = None, start: int = 0) -> np.ndarray:
        """Return aligned, zeroed bytes, or a part of an arena."""
        if within is None:
            return allocate(size)
        if (
            within.dtype != np.uint8
            or within.ndim != 1
            or not within.flags.c_contiguous
            or not within.flags.writeable
        ):
            raise GraphError(
                f"an arena must be a writable array of bytes (got {within.dtype}{list(within.shape)})",
                code="invalid-arena",
            )
        if within.size < start + size or (size and within.ctypes.data % ALIGNMENT):
            raise GraphError(
                f"the plan needs an arena of {size:,} bytes, aligned to {ALIGNMENT} (got {within.size:,} bytes)",
                code="arena-too-small",
            )
        return within[start : start + size]

    def use_memory(self, tensor: Tensor, memory: np.ndarray, changed: bool) -> np.ndarray:
        """Return the bytes of an array like the tensor, or of allocated memory, without a copy."""
        taken = memory.dtype == np.uint8 and memory.shape == (tensor.nbytes,)
        like = memory.shape == tensor.dtype.storage_shape(tensor.shape) and memory.dtype == tensor.dtype.numpy
        if not (taken or like) or not memory.flags.c_contiguous:
            raise GraphError(
                f"{tensor!r} does not fit an array of {memory.dtype}{list(memory.shape)} with strides {memory.strides}",
                code="wrong-array",
            )
        if changed and not memory.flags.writeable:
            raise GraphError(
                f"the program changes {tensor!r}, but its array is read-only", code="read-only-array"
            )
        return memory.reshape(-1).view(np.uint8)

    def view(self, memory: np.ndarray, tensor: Tensor, offset: int, strides: Sequence[int]) -> HostView:
        """Return a tensor's view in memory."""
        if isinstance(tensor.dtype, PackedType):
            return PackedWeight(tensor.shape, memory)
        if isinstance(tensor.dtype, QuantizedType):
            return Blocks(
                tensor.dtype.kind, tensor.shape, memory.reshape(tensor.dtype.storage_shape(tensor.shape))
            )
        if tensor.size == 0:
            return np.zeros(tensor.shape, tensor.dtype.numpy)
        return np.ndarray(tensor.shape, tensor.dtype.numpy, memory, offset, strides)

    def resident_bytes(self, sizes: Iterable[int]) -> int:
        """Return the resident bytes of mapped weights of these sizes."""
        return max(sizes, default=0) if self.drop_pages else sum(sizes)

    # ---- what lies there ---------------------------------------------------

    def read(self, place: HostView) -> np.ndarray:
        """Return a read-only array of a view."""
        seen: np.ndarray = _array(place)[...]
        seen.flags.writeable = False
        return seen

    def write(self, place: HostView, values: Any, at: Any = ...) -> None:
        """Write values to a view or a part of it."""
        _array(place)[at] = values

    def is_finite(self, place: HostView, masks: bool = False) -> bool:
        """Return True if no element is NaN or infinite; with `masks`, minus infinity is allowed."""
        return all(_is_finite(piece, masks) for piece in _decoded_chunks(place))

    # ---- time --------------------------------------------------------------

    def synchronize(self) -> None:
        """Do nothing: a call returns when its work is done."""

    def mark(self) -> float:
        """Return the present moment."""
        return time.perf_counter()

    def seconds(self, moment: float) -> float:
        """Return the moment in seconds."""
        return moment

    # ---- pages of files ----------------------------------------------------

    def read_ahead_calls(self, weight: HostView, ends: np.ndarray | None) -> list[Any]:
        """Return calls that request the pages of a mapped weight; `ends` says which experts have choices."""
        array = _array(weight)
        if not self.reads_ahead or find_mapping(array) is None:
            return []
        return [partial(request_pages, array) if ends is None else partial(request_experts, array, ends)]

    def release_calls(self, places: Sequence[HostView]) -> list[Any]:
        """Return calls that release the pages of mapped sources, except small ones."""
        arrays = (_array(place) for place in places) if self.drop_pages else ()
        return [
            partial(release_pages, array)
            for array in arrays
            if array.ndim > 1 and find_mapping(array) is not None
        ]


def request_experts(stack: np.ndarray, ends: np.ndarray) -> None:
    """Request the pages of the experts that have choices, neighbors at once."""
    is_used = np.diff(ends, prepend=0) > 0
    changes = np.flatnonzero(np.diff(is_used, prepend=False, append=False))
    for first, end in changes.reshape(-1, 2):
        request_pages(stack[first:end])


def _array(place: HostView) -> np.ndarray:
    return place.raw if isinstance(place, Blocks | PackedWeight) else place


def _is_finite(array: np.ndarray, masks: bool) -> bool:
    if array.dtype == np.int32:
        return True
    if array.dtype == np.uint16:  # bfloat16: all exponent bits are set
        return not np.any((array & np.uint16(0x7F80)) == 0x7F80)
    return bool(np.all(array < np.inf if masks else np.isfinite(array)))


def _decoded_chunks(place: HostView) -> Iterator[np.ndarray]:
    """Yield the array, or a quantized weight some decoded rows at a time."""
    if not isinstance(place, Blocks):
        yield _array(place)
        return
    step = max(1, CHECKED_ELEMENTS // place.shape[1])
    for first in range(0, place.shape[0], step):
        yield place.decode_rows(np.s_[first : first + step])
