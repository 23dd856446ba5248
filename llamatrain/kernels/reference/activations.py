"""Reference kernels of `graph/ops/activations.py`, in the same order."""

import numpy as np

from llamatrain.graph.ops.activations import A, B
from llamatrain.kernels.reference.registry import kernel


@kernel
def step(x):
    """Return 1 where x is above 0, else 0."""
    return x > 0


@kernel
def relu(x):
    """Return max(x, 0)."""
    return np.maximum(x, 0)


@kernel
def relu_sqr(x):
    """Return max(x, 0)²."""
    return np.square(np.maximum(x, 0))


@kernel
def relu_sqr_back(dy, x):
    """Return dy times 2 max(x, 0)."""
    return 2 * dy * np.maximum(x, 0)


@kernel
def sigmoid(x):
    """Return 1 / (1 + exp(-x))."""
    return 1 / (1 + np.exp(-x))


def gelu_gate(x):
    """Return the share of x that gelu passes."""
    return sigmoid(x * (x.dtype.type(A) + x.dtype.type(B) * x * x))


@kernel
def exp(x):
    """Return e to the power of x."""
    return np.exp(x)


@kernel
def gelu(x):
    """Return x · sigmoid(A x + B x³)."""
    return x * gelu_gate(x)


@kernel
def gelu_back(dy, x):
    """Return dy times the derivative of gelu at x."""
    s = gelu_gate(x)
    return dy * s * (1 + x * (1 - s) * (x.dtype.type(A) + x.dtype.type(3 * B) * x * x))


@kernel
def xielu(x, *, positive, negative, beta, eps):
    """Return positive x² + beta x above 0, and negative (exp(min(x, eps)) - 1 - x) + beta x elsewhere."""
    positive, negative, beta, eps = map(x.dtype.type, (positive, negative, beta, eps))
    bent = np.where(x > 0, positive * x * x, negative * (np.expm1(np.minimum(x, eps)) - x))
    return bent + beta * x


@kernel
def xielu_back(dy, x, *, positive, negative, beta, eps):
    """Return dy times the derivative of xielu at x."""
    positive, negative, beta, eps = map(x.dtype.type, (positive, negative, beta, eps))
    power = np.where(x < eps, np.exp(np.minimum(x, 0)), 0)
    return dy * (np.where(x > 0, 2 * positive * x, negative * (power - 1)) + beta)


def apply_cap(x, cap):
    """Return softcap of x, or x if there is no cap."""
    return x.dtype.type(cap) * np.tanh(x / x.dtype.type(cap)) if cap else x


@kernel
def softcap(x, *, cap):
    """Return cap tanh(x / cap): small numbers hardly change, and none exceeds cap."""
    return apply_cap(x, cap)


@kernel
def softcap_back(dy, y, *, cap):
    """Return dy (1 - (y / cap)²), where y is the output of softcap."""
    return dy * (1 - np.square(y / y.dtype.type(cap)))
