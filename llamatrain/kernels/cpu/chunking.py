"""Into which blocks an array's work is cut, and whether a result goes past the caches."""

import numpy as np

from llamatrain.kernels.cpu.registry import share

PORTIONS = 64  # blocks of a large array
STREAM = 16 << 20  # bytes of a result from which on it is written past the caches


def portion(items: int, cost: int = 4, unit: int = 1) -> int:
    """How many items of this cost a block has: of large arrays a 64th, since memory is twice as fast to who reads on and on."""
    block = max(share(cost), -(-items // PORTIONS))
    return -(-block // unit) * unit


def streams(out: np.ndarray, *sources: np.ndarray) -> bool:
    """Whether a result goes past the caches: nothing of one so large would still be there when it is read."""
    whole = out.ctypes.data % 64 == 0 and (out.shape[-1] * out.itemsize) % 64 == 0
    return out.nbytes >= STREAM and whole and not any(np.may_share_memory(out, source) for source in sources)
