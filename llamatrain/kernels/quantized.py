"""Frozen weights as kernels get them: the bytes of a file, or those that a device packed, with their shape."""

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np

from llamatrain.gguf import quants
from llamatrain.gguf.types import GgmlType


@dataclass(frozen=True)
class Blocks:
    """A quantized weight with the shape of its elements.

    `raw` has a row of bytes for each row; a plan has none.
    """

    kind: GgmlType
    shape: tuple[int, ...]
    raw: Any = None
    dtype: ClassVar[np.dtype] = np.dtype(np.uint8)

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """The bytes of a row."""
        return self.kind.row_bytes(self.shape[-1])

    def decode_rows(self, selection: np.ndarray | slice | int = np.s_[:]) -> np.ndarray:
        """Decode some rows, a matrix of a stack, or all, to float32."""
        return quants.decode(self.raw[selection], self.kind)


@dataclass(frozen=True)
class PackedWeight:
    """A frozen matrix that is packed for products of a device, with the shape of its elements; a plan has no bytes."""

    shape: tuple[int, ...]
    raw: Any = None
    dtype: ClassVar[np.dtype] = np.dtype(np.uint8)

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)
