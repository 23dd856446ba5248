"""A quantised weight as kernels are given it: the bytes of its file, and what they mean."""

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np

from llamatrain.gguf import quants
from llamatrain.gguf.types import GgmlType


@dataclass(frozen=True)
class Blocks:
    """Looks like an array of the weight's own shape; `raw` has a row of bytes for each of them, and is not there in a plan."""

    kind: GgmlType
    shape: tuple[int, ...]
    raw: Any = None
    dtype: ClassVar[np.dtype] = np.dtype(np.uint8)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def row_bytes(self) -> int:
        return self.kind.row_bytes(self.shape[-1])

    def decode_rows(self, selection: np.ndarray | slice = np.s_[:]) -> np.ndarray:
        """Some of them, or all, as float32."""
        return quants.decode(self.raw[selection], self.kind)
