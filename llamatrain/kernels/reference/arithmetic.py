"""Reference kernels of `graph/ops/arithmetic.py`, in the same order."""

from llamatrain.kernels.reference.registry import kernel


@kernel
def add(a, b):
    """Return a + b with broadcasting."""
    return a + b


@kernel
def sub(a, b):
    """Return a - b with broadcasting."""
    return a - b


@kernel
def mul(a, b):
    """Return a · b with broadcasting."""
    return a * b


@kernel
def scale(x, *, by):
    """Return x times a constant."""
    return x * x.dtype.type(by)


@kernel
def sqr(x):
    """Return x²."""
    return x * x
