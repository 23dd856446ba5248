"""What the ops of `graph/ops/arithmetic.py` do to arrays, in the same order."""

from llamatrain.kernels.reference.registry import kernel


@kernel
def add(a, b):
    return a + b


@kernel
def sub(a, b):
    return a - b


@kernel
def mul(a, b):
    return a * b


@kernel
def scale(x, *, by):
    return x * x.dtype.type(by)


@kernel
def sqr(x):
    return x * x
