"""Reads tensors as ggml's programs wrote them before GGUF, and llama.cpp's finetune its adapters long after.

Layout: u32 number of axes, length of the name, type, the axes (ggml's order), the name, zeros up to a
multiple of 32, and the data.
"""

from math import prod

import numpy as np

from llamatrain.gguf.opened_file import FileTensor
from llamatrain.gguf.parser import NAME_LIMIT, Cursor, quote
from llamatrain.gguf.types import TYPES
from llamatrain.io.mapped_file import MappedFile

ALIGNMENT = 32
READABLE_TYPES = ("F32", "F16")


class MappedCursor(Cursor):
    """A cursor that reads from the mapping.

    In these files data lies between the heads of tensors, and must not be copied.
    """

    def __init__(self, file: MappedFile) -> None:
        super().__init__(file)
        self.data = file

    def read_to(self, end: int) -> None:
        """Move to a position."""


def read_record(cursor: Cursor, named: bool = True) -> FileTensor:
    """Read the head of a tensor and skip its data."""
    cursor.context = "the head of a tensor"
    axes, length, number = cursor.read_u32(), cursor.read_u32(), cursor.read_u32()
    if not 1 <= axes <= 2 or not named <= length <= NAME_LIMIT:
        raise cursor.error(
            f"{axes} dimensions and a name of {length} bytes; there must be 1 or 2 dimensions and 1 to "
            f"{NAME_LIMIT} bytes"
        )
    shape = tuple(cursor.read_u32() for _ in range(axes))[::-1]
    start = cursor.advance(length)
    name = str(cursor.bytes_since(start), "utf-8", "surrogateescape")
    cursor.context = f"tensor {quote(name)}"
    kind = TYPES.get(number)
    if kind is None or kind.name not in READABLE_TYPES:
        raise cursor.error(
            f"type {kind.name if kind else number} is not supported; it must be "
            f"{' or '.join(READABLE_TYPES)}",
            code="unsupported-tensor-type",
        )
    if 0 in shape:
        raise cursor.error(f"a dimension is 0 in {list(shape)}")
    cursor.advance(-cursor.offset % ALIGNMENT)
    start = cursor.advance(prod(shape) * kind.block_bytes)
    return FileTensor(name, kind, shape, start, np.frombuffer(cursor.data, np.uint8))
