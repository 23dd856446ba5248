"""Reference kernels of `graph/ops/quantize.py`, in the same order."""

import numpy as np

from llamatrain.gguf import quants
from llamatrain.gguf.types import type_by_name
from llamatrain.kernels.reference.registry import kernel


@kernel
def fake_quantize(w, *, kind):
    """Return w as it is after it was encoded as a type and decoded again."""
    encoded = quants.encode(np.ascontiguousarray(w, np.float32), type_by_name(kind))
    return quants.decode(encoded, type_by_name(kind)).astype(w.dtype, copy=False)
