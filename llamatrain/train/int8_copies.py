"""Copies of a frozen base that are rounded to 8-bit integers and packed for products, on the processor."""

from collections.abc import Mapping
from math import prod

import numpy as np

from llamatrain.graph.int8 import Int8Copy
from llamatrain.graph.tensor import QuantizedType, Tensor, state
from llamatrain.io.madvise import find_mapping, release_pages
from llamatrain.kernels.cpu.int8_weight import pack_weight, packed_type
from llamatrain.kernels.quantized import Blocks
from llamatrain.model.hyperparameters import Hyperparameters


def is_copied(name: str, h: Hyperparameters) -> bool:
    """Return True for a matrix of a block, which products read."""
    return h.weight_kind(name).role == "matrix" and len(h.shapes[name]) == 2


def make_int8_copies(tensors: Mapping[str, Tensor], h: Hyperparameters) -> dict[str, Int8Copy]:
    """Return leaves for two copies of each matrix, packed for x wᵀ and for dy w."""
    return {
        name: (
            state(f"{name}.int8", tensor.shape, packed_type(tensor.shape, 0)),
            state(f"{name}.int8_across", tensor.shape, packed_type(tensor.shape, 1)),
        )
        for name, tensor in tensors.items()
        if is_copied(name, h)
    }


def int8_copy_bytes(h: Hyperparameters) -> int:
    """Return about how many bytes the copies take."""
    return sum(2 * prod(shape) for name, shape in h.shapes.items() if is_copied(name, h))


def pack_for_int8(leaf: Tensor, array: np.ndarray, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a matrix packed for x wᵀ and for dy w, and release the pages of its file."""
    weight = Blocks(leaf.dtype.kind, leaf.shape, array) if isinstance(leaf.dtype, QuantizedType) else array
    made = pack_weight(weight, 0, threads), pack_weight(weight, 1, threads)
    if find_mapping(array) is not None:
        release_pages(array)
    return made
