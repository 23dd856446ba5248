"""Reference kernels of `graph/ops/gates.py`, in the same order."""

from functools import wraps

import numpy as np

from llamatrain.kernels.reference.activations import gelu, gelu_back, relu, sigmoid
from llamatrain.kernels.reference.registry import from_bf16, kernel, to_bf16


@kernel
def silu(x):
    """Return x · sigmoid(x)."""
    return x * sigmoid(x)


@kernel
def silu_back(dy, x):
    """Return dy times the derivative of silu at x."""
    s = sigmoid(x)
    return dy * s * (1 + x * (1 - s))


def in_float32(gate):
    """Run a gate in float32 and round its results if its sources are bf16."""

    @wraps(gate)
    def run(*sources):
        if sources[-1].dtype != np.uint16:
            return gate(*sources)
        made = gate(*(from_bf16(x) if x.dtype == np.uint16 else x for x in sources))
        return tuple(map(to_bf16, made)) if isinstance(made, tuple) else to_bf16(made)

    return run


@kernel
def glu(gate, up):
    """Return sigmoid(gate) · up."""
    return sigmoid(gate) * up


@kernel
def glu_back(dy, gate, up):
    """Return the gradients of gate and up."""
    s = sigmoid(gate)
    return dy * up * s * (1 - s), dy * s


@kernel
@in_float32
def swiglu(gate, up):
    """Return silu(gate) · up."""
    return silu(gate) * up


@kernel
@in_float32
def swiglu_back(dy, gate, up):
    """Return the gradients of gate and up."""
    return silu_back(dy * up, gate), dy * silu(gate)


@kernel
@in_float32
def geglu(gate, up):
    """Return gelu(gate) · up."""
    return gelu(gate) * up


@kernel
@in_float32
def geglu_back(dy, gate, up):
    """Return the gradients of gate and up."""
    return gelu_back(dy * up, gate), dy * gelu(gate)


@kernel
@in_float32
def reglu(gate, up):
    """Return relu(gate) · up."""
    return relu(gate) * up


@kernel
@in_float32
def reglu_back(dy, gate, up):
    """Return the gradients of gate and up."""
    return np.where(gate > 0, dy * up, 0), dy * relu(gate)


@kernel
def swiglu_halves(x):
    """Return swiglu of the first half of each row, the gate, and the second half."""
    return swiglu(*np.split(x, 2, axis=-1))


@kernel
def swiglu_halves_back(dy, x):
    """Return both gradients as the halves of each row."""
    return np.concatenate(swiglu_back(dy, *np.split(x, 2, axis=-1)), axis=-1)


@kernel
def clipped_swiglu(gate, up, *, slope, limit):
    """Return g · sigmoid(slope · g) · (u + 1), with gates up to a limit, and ups within it."""
    g, u = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return g * sigmoid(g * gate.dtype.type(slope)) * (u + 1)


@kernel
def clipped_swiglu_back(dy, gate, up, *, slope, limit):
    """Return the gradients of gate and up, which are zero beyond the limit."""
    g, u, slope = np.minimum(gate, limit), np.clip(up, -limit, limit), gate.dtype.type(slope)
    s = sigmoid(g * slope)
    dgate = dy * (u + 1) * s * (1 + g * slope * (1 - s))
    return np.where(gate <= limit, dgate, 0), np.where(abs(up) <= limit, dy * g * s, 0)
