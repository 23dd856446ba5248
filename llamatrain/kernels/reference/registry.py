"""Reference kernels by op name, and how one is run into given memory."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llamatrain.graph.tensor import OPS
from llamatrain.kernels.quantized import Blocks

KERNELS: dict[str, Callable[..., Any]] = {}
# ops that numpy computes into `out` without a temporary array
IN_PLACE: dict[str, Callable[..., Any]] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register the reference kernel of the op of its name."""
    KERNELS[function.__name__] = function
    return function


def run_kernel(
    name: str, outs: Sequence[np.ndarray], ins: Sequence[np.ndarray | Blocks], attrs: dict[str, Any]
) -> None:
    """Compute into `outs`, which may share memory with `ins`."""
    with np.errstate(all="ignore"):  # infinities are detected elsewhere
        if name in IN_PLACE:
            IN_PLACE[name](*ins, out=outs[0])
            return
        full = OPS[name].bf16_sources
        sources = [widened(each) if index in full else each for index, each in enumerate(ins)]
        results = KERNELS[name](*sources, **attrs)
    for out, result in zip(outs, results if isinstance(results, tuple) else (results,), strict=True):
        out[...] = to_bf16(result) if is_bf16(out) and not is_bf16(result) else result


def is_bf16(x: np.ndarray | Blocks) -> bool:
    """Return True for an array of bfloat16, whose bits numpy holds as integers."""
    return isinstance(x, np.ndarray) and x.dtype == np.uint16


def widened(x: np.ndarray | Blocks) -> np.ndarray | Blocks:
    """Return an array of bfloat16 as float32, and others as they are."""
    return from_bf16(x) if isinstance(x, np.ndarray) and is_bf16(x) else x


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Return the bits of the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), (bits >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """Convert bfloat16 bits to float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def operands(*sources: np.ndarray | Blocks) -> list[np.ndarray]:
    """Return decoded sources of a product; if one is bfloat16, all are rounded to it."""
    arrays = [source.decode_rows() if isinstance(source, Blocks) else source for source in sources]
    if not any(array.dtype == np.uint16 for array in arrays):
        return arrays
    return [from_bf16(array if array.dtype == np.uint16 else to_bf16(array)) for array in arrays]
