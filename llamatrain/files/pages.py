"""The pages of mapped files that are in this process's memory."""

import mmap

import numpy as np


def map_of(array: np.ndarray) -> mmap.mmap | None:
    """The mapped file that an array lies in, if any. Memory that can be written is none: it would be lost with its pages."""
    owner: object = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    mapped = owner.obj if isinstance(owner, memoryview) else owner
    return mapped if isinstance(mapped, mmap.mmap) and not array.flags.writeable else None


def release(array: np.ndarray) -> None:
    """Take the part of a mapped file that an array lies in out of this process's memory; whoever reads it gets it back."""
    mapped = map_of(array)
    if array.size and mapped is not None and hasattr(mapped, "madvise"):
        low, high = np.lib.array_utils.byte_bounds(array)
        start = np.frombuffer(mapped, np.uint8).ctypes.data
        first = (low - start) // mmap.PAGESIZE * mmap.PAGESIZE
        mapped.madvise(mmap.MADV_DONTNEED, first, high - start - first)
