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


def part(x):
    """Of x that gelu lets through."""
    return sigmoid(x * (x.dtype.type(A) + x.dtype.type(B) * x * x))


@kernel
def gelu(x):
    return x * part(x)


@kernel
def gelu_back(dy, x):
    s = part(x)
    return dy * s * (1 + x * (1 - s) * (x.dtype.type(A) + x.dtype.type(3 * B) * x * x))
