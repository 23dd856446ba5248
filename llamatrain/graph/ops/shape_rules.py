"""Checks that shape rules share."""

import numpy as np

from llamatrain.graph.tensor import BF16, I32, DType, DynamicDim, Shape, ShapeError, Spec

Slices = tuple[tuple[int, int, int], ...]  # (start, stop, step) for each axis, step > 0


def floats(*specs: Spec) -> DType:
    """Return the float type that all specs share."""
    kinds = {spec.dtype for spec in specs}
    if len(kinds) > 1 or kinds & {BF16, I32}:
        raise ShapeError(
            f"needs sources of one float type, not {' and '.join(sorted(kind.name for kind in kinds))}"
        )
    return kinds.pop()


def broadcast(*shapes: Shape) -> Shape:
    """Return the common shape; a dynamic axis stays dynamic."""
    try:
        found = np.broadcast_shapes(*shapes)
    except ValueError:
        raise ShapeError(
            f"shapes {' and '.join(str(list(shape)) for shape in shapes)} do not broadcast"
        ) from None
    return next(
        (shape for shape in shapes if shape == found and any(isinstance(size, DynamicDim) for size in shape)),
        found,
    )


def alike(x: Spec, y: Spec) -> Spec:
    """Return x if y has its type."""
    require(x.dtype is y.dtype, f"needs sources of one type, not {x.dtype} and {y.dtype}")
    return x


def require(holds: bool, what: str) -> None:
    """Raise ShapeError if a condition does not hold."""
    if not holds:
        raise ShapeError(what)


def capped(cap: float) -> None:
    """Check that a soft cap is 0 or more."""
    require(0 <= cap < np.inf, f"cannot cap numbers at {cap}; 0 leaves them as they are")


def region(x: Spec, slices: Slices) -> Shape:
    """Return the shape of a part of x."""
    require(len(slices) == len(x.shape), f"needs a (start, stop, step) for each axis, not {slices}")
    for (start, stop, step), size in zip(slices, x.shape, strict=True):
        require(0 <= start <= stop <= size and step > 0, f"slice {start}:{stop}:{step} is not within {size}")
    return tuple(len(range(*each)) for each in slices)


FUSED = "it is made of nodes whose gradients exist already (graph/fuse.py)"
SECOND = "it is a gradient itself, and not one whose own is simple"  # why some ops have no gradient
