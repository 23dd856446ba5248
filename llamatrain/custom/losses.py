"""Losses of an output: the sum over samples of a sample's loss times its weight.

    cross_entropy    of classes along the last axis; targets are numbers of classes, or distributions
    mse              mean of squared differences; targets are like the output
    mean             mean of the output
    sum              sum of the output

The first three are means over the samples of a step, the last one is a sum.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from llamatrain.config.messages import quote, suggest
from llamatrain.custom.dataset import Dataset, check_values
from llamatrain.errors import DataError, UsageError
from llamatrain.graph.ops import (
    cross_entropy_loss,
    flatten,
    mul,
    repeat,
    reshape,
    scale,
    sqr,
    sub,
    sum,
    sum_rows,
)
from llamatrain.graph.tensor import F32, I32, Tensor, placeholder

Build = Callable[[Tensor, Tensor | None, Tensor], Tensor]  # output, targets, weights of samples -> loss


@dataclass(frozen=True)
class Loss:
    """A loss: how its graph is built, and its targets."""

    build: Build
    has_targets: bool = True
    has_classes: bool = False  # the targets may be numbers of classes, and predictions are counted
    is_sum: bool = False

    def create_targets(self, output: Tensor, dataset: Dataset) -> Tensor | None:
        """Return the leaf for the targets of a dataset, which are checked; None if the loss has none."""
        if not self.has_targets:
            return None
        if dataset.targets is None:
            raise DataError("this loss needs targets; give them to the dataset", code="no-targets")
        by_number = self.has_classes and dataset.targets.dtype.kind in "iub"
        if self.has_classes and len(output.shape) < 2:
            raise UsageError(
                f"the loss cross_entropy needs an output (batch, ..., classes) (got {list(output.shape)})",
                code="invalid-output",
            )
        leaf = (
            placeholder("targets", output.shape[:-1], I32)
            if by_number
            else placeholder("targets", output.shape, F32)
        )
        check_values(dataset.targets, leaf, "targets")
        if by_number and not 0 <= dataset.targets.min() <= dataset.targets.max() < output.shape[-1]:
            raise DataError(
                f"targets: must be numbers of classes from 0 to {output.shape[-1] - 1} "
                f"(got {dataset.targets.min()} to {dataset.targets.max()})",
                code="wrong-class",
            )
        return leaf

    def count_correct(self, output: np.ndarray, targets: np.ndarray) -> int:
        """Return the number of predictions whose largest score is that of the target."""
        right = targets if targets.ndim < output.ndim else targets.argmax(-1)
        return int(np.count_nonzero(output.argmax(-1) == right))


def get_loss(name: str) -> Loss:
    """Return a loss by its name."""
    if name not in LOSSES:
        raise UsageError(
            f"loss must be {', '.join(LOSSES)} (got {quote(name)}){suggest(str(name), LOSSES)}",
            code="unknown-loss",
        )
    return LOSSES[name]


# ---- the graphs ------------------------------------------------------------


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of all values (batch, ...), each times the weight of its sample."""
    return sum(mul(sum_rows(flatten(values)), reshape(weights, shape=(weights.size, 1))))


def cross_entropy(output: Tensor, targets: Tensor | None, weights: Tensor) -> Tensor:
    """Return the mean over the positions of a sample."""
    assert targets
    positions, classes = math.prod(output.shape[1:-1]), output.shape[-1]
    rows = weights.size * positions
    each = repeat(reshape(weights, shape=(weights.size, 1)), shape=(weights.size, positions))
    shares = scale(reshape(each, shape=(rows,)), by=1 / positions)
    aims = reshape(targets, shape=(rows,) if targets.dtype is I32 else (rows, classes))
    return cross_entropy_loss(reshape(output, shape=(rows, classes)), aims, shares)


def mean_squared_error(output: Tensor, targets: Tensor | None, weights: Tensor) -> Tensor:
    """Return the mean over the elements of a sample."""
    assert targets
    return mean(sqr(sub(output, targets)), targets, weights)


def mean(output: Tensor, targets: Tensor | None, weights: Tensor) -> Tensor:
    """Return the mean over the elements of a sample."""
    return scale(weighted_sum(output, weights), by=weights.size / output.size)


def total(output: Tensor, targets: Tensor | None, weights: Tensor) -> Tensor:
    """Return the sum over the elements of a sample."""
    return weighted_sum(output, weights)


LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, has_classes=True),
    "mse": Loss(mean_squared_error),
    "mean": Loss(mean, has_targets=False),
    "sum": Loss(total, has_targets=False, is_sum=True),
}
