"""Bytes of idx files."""

import struct

import numpy as np


def idx_bytes(array: np.ndarray, kind: int = 8) -> bytes:
    """The file of an array, in the type of this number (8: bytes)."""
    head = bytes([0, 0, kind, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(array.dtype.newbyteorder(">")).tobytes()
