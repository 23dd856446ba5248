"""What the ops of `graph/ops/gates.py` do to arrays, in the same order."""

import numpy as np

from llamatrain.kernels.reference.activations import sigmoid
from llamatrain.kernels.reference.registry import from_bf16, kernel, to_bf16


@kernel
def silu(x):
    return x * sigmoid(x)


@kernel
def silu_back(dy, x):
    s = sigmoid(x)
    return dy * s * (1 + x * (1 - s))


@kernel
def swiglu(gate, up):
    if gate.dtype == np.uint16:
        return to_bf16(swiglu(from_bf16(gate), from_bf16(up)))
    return silu(gate) * up


@kernel
def swiglu_back(dy, gate, up):
    if gate.dtype == np.uint16:
        return tuple(to_bf16(each) for each in swiglu_back(dy, from_bf16(gate), from_bf16(up)))
    return silu_back(dy * up, gate), dy * silu(gate)
