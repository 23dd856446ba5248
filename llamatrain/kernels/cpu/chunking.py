"""Into which blocks an array's work is cut, and whether a result goes past the caches."""

import numpy as np

from llamatrain.kernels.cpu.registry import items_per_block

MAX_BLOCKS = 64  # blocks of a large array
STREAM_BYTES = 16 << 20  # bytes of a result from which on it is written past the caches


def choose_block(items: int, cost: int = 4, unit: int = 1) -> int:
    """How many items of this cost a block has: of large arrays a 64th, since memory is twice as fast to who reads on and on."""
    block = max(items_per_block(cost), -(-items // MAX_BLOCKS))
    return -(-block // unit) * unit


def should_stream(out: np.ndarray, *sources: np.ndarray) -> bool:
    """Whether a result goes past the caches: nothing of one so large would still be there when it is read."""
    whole = out.ctypes.data % 64 == 0 and (out.shape[-1] * out.itemsize) % 64 == 0
    return (
        out.nbytes >= STREAM_BYTES
        and whole
        and not any(np.may_share_memory(out, source) for source in sources)
    )
