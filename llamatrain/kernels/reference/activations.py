"""What the ops of `graph/ops/activations.py` do to arrays, in the same order."""

import numpy as np

from llamatrain.graph.ops.activations import A, B
from llamatrain.kernels.reference.registry import kernel


@kernel
def step(x):
    return x > 0


@kernel
def relu(x):
    return np.maximum(x, 0)


@kernel
def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu_gate(x):
    """Of x that gelu lets through."""
    return sigmoid(x * (x.dtype.type(A) + x.dtype.type(B) * x * x))


@kernel
def gelu(x):
    return x * gelu_gate(x)


@kernel
def gelu_back(dy, x):
    s = gelu_gate(x)
    return dy * s * (1 + x * (1 - s) * (x.dtype.type(A) + x.dtype.type(3 * B) * x * x))


def apply_cap(x, cap):
    """As softcap, or untouched where there is no cap."""
    return x.dtype.type(cap) * np.tanh(x / x.dtype.type(cap)) if cap else x


@kernel
def softcap(x, *, cap):
    return apply_cap(x, cap)


@kernel
def softcap_back(dy, y, *, cap):
    return dy * (1 - np.square(y / y.dtype.type(cap)))
