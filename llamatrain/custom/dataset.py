"""Samples with their targets, in memory or mapped."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from llamatrain.config.messages import quote
from llamatrain.custom.graph import Graph
from llamatrain.errors import DataError, UsageError
from llamatrain.graph.tensor import I32, Tensor


class Dataset:
    """Arrays whose first axis counts samples: one for each input of a graph, and the targets.

    Arrays keep their types, so that images may be bytes; each batch is converted.
    """

    def __init__(self, inputs: ArrayLike | Mapping[str, ArrayLike], targets: ArrayLike | None = None) -> None:
        """Take an array for the input "input", or a mapping of names to arrays, and optional targets."""
        given = inputs if isinstance(inputs, Mapping) else {"input": inputs}
        self.inputs = {name: check_numbers(values, f"input {quote(name)}") for name, values in given.items()}
        self.targets = None if targets is None else check_numbers(targets, "targets")
        counts = {len(array) for array in self.arrays}
        if len(counts) != 1 or counts == {0}:
            raise DataError(
                "inputs and targets must have one number of samples, at least 1 "
                f"(got {', '.join(str(len(array)) for array in self.arrays) or 'no array'})",
                code="invalid-dataset",
            )
        (self.count,) = counts

    @property
    def arrays(self) -> list[np.ndarray]:
        """The inputs, and the targets if there are any."""
        return [*self.inputs.values(), *([] if self.targets is None else [self.targets])]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, rows: slice | Sequence[int] | np.ndarray) -> "Dataset":
        """Return some samples: a slice is a view, numbers of samples are copied."""
        targets = None if self.targets is None else self.targets[rows]
        return Dataset({name: array[rows] for name, array in self.inputs.items()}, targets)

    def split(self, share: float) -> tuple["Dataset", "Dataset"]:
        """Return the first samples, and the last ones as a share of all, such as 0.1 for validation."""
        last = round(len(self) * share) if isinstance(share, int | float) and 0 < share < 1 else 0
        if not 0 < last < len(self):
            raise UsageError(
                f"validation must be a dataset, or a share of {len(self):,} samples that leaves some on both sides "
                f"(got {quote(share)})",
                code="invalid-validation",
            )
        return self[: len(self) - last], self[len(self) - last :]

    def check_inputs(self, graph: Graph) -> None:
        """Check that the inputs are those of a graph."""
        if self.inputs.keys() != graph.inputs.keys():
            raise DataError(
                f"the dataset has the inputs {names_of(self.inputs)}, and the graph has {names_of(graph.inputs)}",
                code="wrong-inputs",
            )
        for name, leaf in graph.inputs.items():
            check_values(self.inputs[name], leaf, f"input {quote(name)}")


def names_of(table: Mapping[str, object]) -> str:
    """Return the names in a table, for a message."""
    return ", ".join(quote(name) for name in table) or "none"


def check_numbers(values: ArrayLike, what: str) -> np.ndarray:
    """Return an array of finite numbers with at least one axis."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise DataError(f"{what}: cannot become an array: {error}", code="invalid-dataset") from None
    if array.dtype.kind not in "fiub" or array.ndim < 1:
        raise DataError(
            f"{what}: needs an array of numbers whose first axis counts samples (got {array.dtype}{list(array.shape)})",
            code="invalid-dataset",
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise DataError(f"{what}: has NaN or infinity", code="not-finite")
    return array


def check_values(array: np.ndarray, leaf: Tensor, what: str) -> None:
    """Check that samples have the shape of a leaf without its batch, and its kind of numbers."""
    if array.shape[1:] != leaf.shape[1:]:
        raise DataError(
            f"{what}: a sample must have the shape {list(leaf.shape[1:])} (got {list(array.shape[1:])})",
            code="wrong-shape",
        )
    if leaf.dtype is I32 and (
        array.dtype.kind not in "iub" or not -(2**31) <= array.min() <= array.max() < 2**31
    ):
        raise DataError(f"{what}: needs whole numbers of 32 bits (got {array.dtype})", code="wrong-type")
