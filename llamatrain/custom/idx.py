"""Reads idx files, the format of MNIST: a head with type and shape, and numbers in big-endian order."""

import math
from pathlib import Path

import numpy as np

from llamatrain.errors import FileError
from llamatrain.gguf.wrong_file import PACKED
from llamatrain.io.mapped_file import map_file, verify_unchanged

TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
MAX_AXES = 8
AXIS_BYTES = 4


def read_idx(path: str | Path) -> np.ndarray:
    """Return the array in an idx file, such as train-images-idx3-ubyte."""
    path = Path(path)
    if path.is_dir():
        raise FileError(f"{path}: this is a folder; an idx file is needed", code="not-idx")
    file = map_file(path, "an idx file")
    head = file.read_bytes(0, min(len(file), 4 + MAX_AXES * AXIS_BYTES))
    if command := next((command for mark, command in PACKED.items() if head.startswith(mark)), None):
        raise FileError(f"{path}: a packed file; unpack it first, as with `{command}`", code="not-idx")
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in TYPES or not 1 <= head[3] <= MAX_AXES:
        raise FileError(f"{path}: begins with {head[:4]!r}, which no idx file does", code="not-idx")
    kind, start = np.dtype(TYPES[head[2]]), 4 + head[3] * AXIS_BYTES
    shape = tuple(int.from_bytes(head[i : i + AXIS_BYTES]) for i in range(4, start, AXIS_BYTES))
    if (needed := start + math.prod(shape) * kind.itemsize) != len(file) or len(head) < start:
        raise FileError(
            f"{path}: an array of {list(shape)} needs a file of {needed:,} bytes (got {len(file):,})",
            code="wrong-size",
        )
    with verify_unchanged([file]):
        values = np.frombuffer(file, kind, offset=start).reshape(shape)
        return values.astype(kind.newbyteorder("="))
