"""What the ops of `graph/ops/gates.py` do to arrays, in the same order."""

from functools import wraps

import numpy as np

from llamatrain.kernels.reference.activations import gelu, gelu_back, sigmoid
from llamatrain.kernels.reference.registry import from_bf16, kernel, to_bf16


@kernel
def silu(x):
    return x * sigmoid(x)


@kernel
def silu_back(dy, x):
    s = sigmoid(x)
    return dy * s * (1 + x * (1 - s))


def in_float32(gate):
    """What comes in bf16 is widened before, and what goes out of that is rounded."""

    @wraps(gate)
    def run(*sources):
        if sources[-1].dtype != np.uint16:
            return gate(*sources)
        made = gate(*(from_bf16(x) if x.dtype == np.uint16 else x for x in sources))
        return tuple(map(to_bf16, made)) if isinstance(made, tuple) else to_bf16(made)

    return run


@kernel
@in_float32
def swiglu(gate, up):
    return silu(gate) * up


@kernel
@in_float32
def swiglu_back(dy, gate, up):
    return silu_back(dy * up, gate), dy * silu(gate)


@kernel
@in_float32
def geglu(gate, up):
    return gelu(gate) * up


@kernel
@in_float32
def geglu_back(dy, gate, up):
    return gelu_back(dy * up, gate), dy * gelu(gate)


@kernel
def swiglu_halves(x):
    return swiglu(*np.split(x, 2, axis=-1))


@kernel
def swiglu_halves_back(dy, x):
    return np.concatenate(swiglu_back(dy, *np.split(x, 2, axis=-1)), axis=-1)
