"""What shape rules ask of their sources."""

import numpy as np

from llamatrain.graph.tensor import BF16, I32, DType, DynamicDim, Shape, ShapeError, Spec

Slices = tuple[tuple[int, int, int], ...]  # (start, stop, step) for each axis, step > 0


def floats(*specs: Spec) -> DType:
    """The float type that all these share."""
    kinds = {spec.dtype for spec in specs}
    if len(kinds) > 1 or kinds & {BF16, I32}:
        raise ShapeError(
            f"needs sources of one float type, not {' and '.join(sorted(kind.name for kind in kinds))}"
        )
    return kinds.pop()


def broadcast(*shapes: Shape) -> Shape:
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
    """x, where y of any one type is to be put into it."""
    require(x.dtype is y.dtype, f"needs sources of one type, not {x.dtype} and {y.dtype}")
    return x


def require(holds: bool, what: str) -> None:
    if not holds:
        raise ShapeError(what)


def capped(cap: float) -> None:
    require(0 <= cap < np.inf, f"cannot cap numbers at {cap}; 0 leaves them as they are")


def region(x: Spec, slices: Slices) -> Shape:
    """The shape of a part of x."""
    require(len(slices) == len(x.shape), f"needs a (start, stop, step) for each axis, not {slices}")
    for (start, stop, step), size in zip(slices, x.shape, strict=True):
        require(0 <= start <= stop <= size and step > 0, f"slice {start}:{stop}:{step} is not within {size}")
    return tuple(len(range(*each)) for each in slices)


SECOND = "it is a gradient itself, and not one whose own is simple"  # why some ops have none
