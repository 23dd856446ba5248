"""Tensors as ggml's programs wrote them before GGUF, and llama.cpp's finetune its adapters for long after.

u32 dimensions, length of the name, type, the axes (ggml's order), the name, zeros up to a multiple of 32, and the data.
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
    """Over data that is not to be copied with the heads that lie between."""

    def __init__(self, file: MappedFile) -> None:
        super().__init__(file)
        self.data = file

    def read_to(self, end: int) -> None: ...


def read_record(cursor: Cursor, named: bool = True) -> FileTensor:
    cursor.context = "the head of a tensor"
    axes, length, number = cursor.read_u32(), cursor.read_u32(), cursor.read_u32()
    if not 1 <= axes <= 2 or not named <= length <= NAME_LIMIT:
        raise cursor.error(
            f"{axes} dimensions and a name of {length} bytes; 1 or 2, and 1 to {NAME_LIMIT} can be"
        )
    shape = tuple(cursor.read_u32() for _ in range(axes))[::-1]
    start = cursor.advance(length)
    name = str(cursor.bytes_since(start), "utf-8", "surrogateescape")
    cursor.context = f"tensor {quote(name)}"
    kind = TYPES.get(number)
    if kind is None or kind.name not in READABLE_TYPES:
        raise cursor.error(
            f"its type is {kind.name if kind else number}; {' and '.join(READABLE_TYPES)} can be"
        )
    if 0 in shape:
        raise cursor.error(f"a dimension of 0 in {list(shape)}")
    cursor.advance(-cursor.offset % ALIGNMENT)
    start = cursor.advance(prod(shape) * kind.block_bytes)
    return FileTensor(name, kind, shape, start, np.frombuffer(cursor.data, np.uint8))
