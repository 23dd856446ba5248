"""Pages of mapped files: which are resident in this process, and which are read soon."""

import mmap

import numpy as np

from llamatrain.platform.memory import drop_pages, request_pages_of_file

FAULT_AROUND = 1 << 16  # bytes that the kernel maps around a page fault
MAX_FOLIO = 1 << 21  # the largest folio of a file, which newer kernels (Linux 6.18) map as a whole


def find_mapping(array: np.ndarray) -> mmap.mmap | None:
    """Return the mapped file that an array lies in, or None.

    Writable memory gives None: its contents would be lost with its pages.
    """
    owner: object = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    mapped = owner.obj if isinstance(owner, memoryview) else owner
    return mapped if isinstance(mapped, mmap.mmap) and not array.flags.writeable else None


def release_pages(array: np.ndarray) -> None:
    """Drop the pages of a mapped file that hold an array, and those that the kernel mapped around them.

    For a thousand small tensors, the pages around them would be tens of megabytes. A later read maps them
    again.
    """
    mapped = find_mapping(array)
    if array.size and mapped is not None:
        low, high = file_range(mapped, array)
        first = max(0, low - FAULT_AROUND) // MAX_FOLIO * MAX_FOLIO
        last = min(len(mapped), -(-(high + FAULT_AROUND) // MAX_FOLIO) * MAX_FOLIO)
        drop_pages(mapped, first, last - first)


def request_pages(array: np.ndarray) -> None:
    """Let the system read the pages of a mapped file that hold an array, before they are needed."""
    mapped = find_mapping(array)
    if array.size and mapped is not None:
        low, high = file_range(mapped, array)
        first = low // mmap.PAGESIZE * mmap.PAGESIZE
        request_pages_of_file(mapped, first, high - first)


def file_range(mapped: mmap.mmap, array: np.ndarray) -> tuple[int, int]:
    """Return the first byte of a mapped file that holds an array, and the one behind its last."""
    start = np.frombuffer(mapped, np.uint8).ctypes.data
    low, high = np.lib.array_utils.byte_bounds(array)
    return low - start, high - start
