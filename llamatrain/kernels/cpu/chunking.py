"""The size of blocks that work is divided into, and whether a result bypasses the caches."""

import numpy as np

from llamatrain.kernels.cpu.registry import items_per_block

MAX_BLOCKS = 64  # the largest number of blocks
STREAM_BYTES = 16 << 20  # bytes of a result from which on it bypasses the caches


def choose_block(items: int, cost: int = 4, unit: int = 1) -> int:
    """Return the number of items of this cost in a block.

    For large arrays it is a 64th of all items: memory is twice as fast when it is read in long runs.
    """
    block = max(items_per_block(cost), -(-items // MAX_BLOCKS))
    return -(-block // unit) * unit


def should_stream(out: np.ndarray, *sources: np.ndarray) -> bool:
    """Return True if a result should bypass the caches: it is too large to be there when it is read."""
    whole = out.ctypes.data % 64 == 0 and (out.shape[-1] * out.itemsize) % 64 == 0
    return (
        out.nbytes >= STREAM_BYTES
        and whole
        and not any(np.may_share_memory(out, source) for source in sources)
    )
