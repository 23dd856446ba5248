"""Kernels by the name of their op, and how one is run into given memory."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llamatrain.kernels.quantized import Blocks

KERNELS: dict[str, Callable[..., Any]] = {}
# what numpy writes where it is to be, without an array of its own
IN_PLACE: dict[str, Callable[..., Any]] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    KERNELS[function.__name__] = function
    return function


def run_kernel(
    name: str, outs: Sequence[np.ndarray], ins: Sequence[np.ndarray | Blocks], attrs: dict[str, Any]
) -> None:
    """Compute into `outs`, which may share memory with `ins`."""
    with np.errstate(all="ignore"):  # what is not finite is found where it matters, and named
        if name in IN_PLACE:
            IN_PLACE[name](*ins, out=outs[0])
            return
        results = KERNELS[name](*ins, **attrs)
    for out, result in zip(outs, results if isinstance(results, tuple) else (results,), strict=True):
        out[...] = result


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Rounded to the nearest bfloat16, ties to even; its bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), (bits >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def operands(*sources: np.ndarray | Blocks) -> list[np.ndarray]:
    """The sources of a matrix product, decoded; if one is bfloat16, all are rounded to it."""
    arrays = [source.decode_rows() if isinstance(source, Blocks) else source for source in sources]
    if not any(array.dtype == np.uint16 for array in arrays):
        return arrays
    return [from_bf16(array if array.dtype == np.uint16 else to_bf16(array)) for array in arrays]
