"""Memory of a torch device: bytes in a tensor, and views of them."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor as Torch

from llamatrain.errors import DeviceError, GraphError
from llamatrain.graph.tensor import BF16, F32, F64, I32, DType, QuantizedType, Tensor
from llamatrain.io.madvise import release_pages
from llamatrain.kernels.quantized import Blocks
from llamatrain.kernels.torch.dequantize import dequantize
from llamatrain.platform.memory import ALIGNMENT

TYPES: dict[DType, torch.dtype] = {
    F32: torch.float32,
    F64: torch.float64,
    BF16: torch.bfloat16,
    I32: torch.int32,
}
COPIED_BYTES = 64 << 20  # bytes of an array that are copied to a device at a time
CHECKED_ELEMENTS = 1 << 24  # elements of a quantized weight that are checked at a time


class ZeroInputs:
    """The inputs that were last filled with zeros: kernels may choose by them, since recordings are kept apart.

    `asked` has the addresses of inputs that a kernel chose by.
    """

    def __init__(self) -> None:
        self.addresses, self.asked = set[int](), set[int]()

    def note(self, place: Torch, values: Any, is_whole: bool) -> None:
        """Note what is written to an input."""
        if is_whole and not np.any(values):
            self.addresses.add(place.data_ptr())
        else:
            self.addresses.discard(place.data_ptr())

    def forget(self, memory: Torch) -> None:
        """Note that an address is used for something else."""
        self.addresses.discard(memory.data_ptr())

    def __contains__(self, place: Torch) -> bool:
        self.asked.add(place.data_ptr())
        return place.data_ptr() in self.addresses


zero_inputs = ZeroInputs()
View: TypeAlias = Torch | Blocks


@contextmanager
def device_errors(name: str) -> Iterator[None]:
    """Turn errors of torch into one line that names the device."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"--device {name} is out of memory; use --memory with less than it has, or a smaller --batch or --ctx",
            code="device-out-of-memory",
        ) from error
    except RuntimeError as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise DeviceError(f"--device {name} failed: {first[:200]}", code="device-failed") from error


class TorchMemory:
    """Memory is a flat tensor of bytes; a view in it is a tensor, or the blocks of a quantized weight."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device

    def allocate(self, size: int, within: Torch | None = None, start: int = 0) -> Torch:
        """Return zeroed bytes, or a part of an arena."""
        if within is None:
            with device_errors(self.name):
                padded = -(-size // ALIGNMENT) * ALIGNMENT
                memory = torch.zeros(padded, dtype=torch.uint8, device=self.device)[:size]
            zero_inputs.forget(memory)
            return memory
        if within.numel() < start + size:
            raise GraphError(
                f"the plan needs an arena of {start + size:,} bytes (got {within.numel():,} bytes)",
                code="arena-too-small",
            )
        return within[start : start + size]

    def read_ahead_calls(self, weight: Torch, ends: Torch | None) -> list[Any]:
        """Return no calls: weights have been copied to the device."""
        return []

    def upload(self, array: np.ndarray) -> Torch:
        """Return a copy of an array on the device, and release the pages of a mapped file.

        On the CPU the array itself is used.
        """
        flat = array.reshape(-1).view(np.uint8)
        if self.device.type == "cpu":
            copy = from_array(flat)
            zero_inputs.forget(copy)
            return copy
        with device_errors(self.name):
            copy = torch.empty(flat.size, dtype=torch.uint8, device=self.device)
            for first in range(0, flat.size, COPIED_BYTES):
                copy[first : first + COPIED_BYTES].copy_(from_array(flat[first : first + COPIED_BYTES]))
        zero_inputs.forget(copy)
        release_pages(array)
        return copy

    def use_memory(self, tensor: Tensor, memory: np.ndarray | Torch, changed: bool) -> Torch:
        """Return memory for a tensor: an uploaded array, allocated memory, or another program's view."""
        if isinstance(memory, np.ndarray):
            if changed and (self.device.type != "cpu" or not memory.flags.writeable):
                raise GraphError(
                    f"the program changes {tensor!r}, but its array is not on --device {self.name}",
                    code="read-only-array",
                )
            memory = self.upload(memory)
        size = memory.numel() * memory.element_size()
        if not memory.is_contiguous() or size != tensor.nbytes:
            raise GraphError(f"{tensor!r} does not fit memory of {size:,} bytes", code="wrong-array")
        return memory.reshape(-1).view(torch.uint8)

    def view(self, memory: Torch, tensor: Tensor, offset: int, strides: Sequence[int]) -> View:
        """Return a tensor's view in memory."""
        if isinstance(tensor.dtype, QuantizedType):
            raw = memory.view(tensor.dtype.storage_shape(tensor.shape))
            return Blocks(tensor.dtype.kind, tensor.shape, raw)
        dtype, size = TYPES[tensor.dtype], tensor.dtype.size
        if tensor.size == 0:
            return torch.zeros(tensor.shape, dtype=dtype, device=self.device)
        whole = memory[: memory.numel() // size * size].view(dtype)
        steps = [stride // size for stride in strides]
        return whole.as_strided(tensor.shape, steps, whole.storage_offset() + offset // size)

    # ---- what lies there ---------------------------------------------------

    def read(self, place: View) -> np.ndarray:
        """Return a read-only array of a view."""
        tensor = place.raw if isinstance(place, Blocks) else place
        with device_errors(self.name):
            array: np.ndarray = as_bits(tensor.detach().cpu()).contiguous().numpy()[...]
        array.flags.writeable = False
        return array

    def write(self, place: View, values: Any, at: Any = ...) -> None:
        """Write values to a view or a part of it."""
        whole = as_bits(place.raw if isinstance(place, Blocks) else place)
        target = whole[at]
        zero_inputs.note(whole, values, at is ...)
        if np.ndim(values) == 0 and target.dtype is not torch.uint16:
            target.fill_(values.item() if isinstance(values, np.generic | np.ndarray) else values)
            return
        dtype = np.dtype(str(target.dtype).removeprefix("torch."))
        source = torch.from_numpy(np.array(np.broadcast_to(values, target.shape), dtype))
        with device_errors(self.name):
            target.copy_(source.pin_memory() if self.device.type == "cuda" else source, non_blocking=True)

    def is_finite(self, place: View, masks: bool = False) -> bool:
        """Return True if no element is NaN or infinite; with `masks`, minus infinity is allowed."""
        with device_errors(self.name):
            return all(is_finite(piece, masks) for piece in decoded_chunks(place))


def from_array(array: np.ndarray) -> Torch:
    """Return a tensor with an array's memory, which may be read-only: nothing is written to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)


def as_bits(tensor: Torch) -> Torch:
    """Return bfloat16 as the bits that numpy holds it in, and other types as they are."""
    return tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor


def is_finite(x: Torch, masks: bool) -> bool:
    """Return True if all elements are finite, or minus infinity with `masks`."""
    if not x.dtype.is_floating_point:
        return True
    return bool((x < torch.inf if masks else torch.isfinite(x)).all())


def decoded_chunks(place: View) -> Iterator[Torch]:
    """Yield the tensor, or a quantized weight some decoded rows at a time."""
    if not isinstance(place, Blocks):
        yield place
        return
    columns = place.shape[1]
    for raw in place.raw.split(max(1, CHECKED_ELEMENTS // columns)):
        yield dequantize(raw, place.kind, torch.empty(len(raw), columns, device=raw.device))
