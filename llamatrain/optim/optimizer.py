"""The interface of optimizers; each one is a file in methods/.

An ElementwiseRule updates each weight from its gradient inside the graph, at a learning rate. A Minimizer
moves a point, the vector of all weights, by evaluations of loss and gradient.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from llamatrain.graph.tensor import Tensor, state

Evaluate = Callable[[np.ndarray], tuple[float, np.ndarray]]  # point -> loss, gradient
Values = Mapping[str, Any]  # arrays and numbers by name in a checkpoint, without the common prefix
VECTORS = (
    "norm.weight",
    ".ssm_a",
    ".ssm_a.log",
    ".ssm_d",
)  # ends of names of weights that are vectors, in rows or not
RATE_OPTIONS = ("lr", "lr_min", "warmup", "schedule", "decay_steps", "restart_growth", "lora_plus_ratio")


class MinimizerState(Protocol):
    """The state of a minimizer. Point, loss and gradient belong together, after a failed step too."""

    x: np.ndarray
    loss: float  # NaN before `begin`
    gradient: np.ndarray
    evaluations: int
    iteration: int  # on these rows
    length: float  # of the last step, in multiples of the direction

    def begin(self, evaluate: Evaluate) -> None:
        """Evaluate loss and gradient at the first point."""

    def step(self, evaluate: Evaluate) -> str | None:
        """Run one iteration; return why there can be none, or None.

        An exception leaves the state unchanged.
        """

    def restart(self) -> None:
        """Start again from this point, on other rows."""

    def state_values(self) -> dict[str, Any]:
        """Return the state for a checkpoint; arrays are not copied."""

    def restore(self, values: Values) -> None:
        """Restore the state; start afresh if `values` is empty."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The settings of an optimizer. Its fields are set by the options of the same names."""

    # optimizer.type in a checkpoint; its values are optimizer.<checkpoint_name>.*
    checkpoint_name: ClassVar[str]
    # state vectors: suffix of the leaves' names, and name in a checkpoint
    states: ClassVar[Mapping[str, str]] = {}
    nonnegative: ClassVar[Collection[str]] = ()  # state tensors that must not have values below 0
    full_models_only: ClassVar[bool] = False  # not for adapters
    needs_f32: ClassVar[bool] = False  # use bf16 products only if requested
    options: ClassVar[Mapping[str, str | None]] = {}  # fields whose option has another name, or None
    # options that set no field and apply only to some optimizers
    extra_options: ClassVar[Collection[str]] = ()

    @classmethod
    def field_options(cls) -> dict[str, str]:
        """Return the option that sets each field."""
        names = {field.name: cls.options.get(field.name, field.name) for field in fields(cls)}
        return {field: option for field, option in names.items() if option}

    @classmethod
    def from_options(cls, values: Mapping[str, Any]) -> Self:
        """Create the optimizer from the values of options; None stands for the default of its own."""
        return cls(
            **{
                field: values[option]
                for field, option in cls.field_options().items()
                if values.get(option) is not None
            }
        )

    @classmethod
    def used_options(cls) -> tuple[str, ...]:
        """Return the options that have an effect, among those that do not apply to every optimizer."""
        return (*cls.extra_options, *cls.field_options().values())

    @classmethod
    def checkpoint_key(cls, name: str) -> str:
        """Return the key of a value in a checkpoint."""
        return f"optimizer.{cls.checkpoint_name}.{name}"

    @classmethod
    def required_shapes(cls, kept: Values, size: int) -> dict[str, tuple[int, ...]]:
        """Return name and shape of the tensors that resuming needs; `size` elements are trained."""
        return dict.fromkeys(cls.states.values(), (size,))

    @classmethod
    def state_problem(cls, values: Values) -> str | None:
        """Return why it cannot resume from these values, whose shapes are right; None if it can."""

    @classmethod
    def has_state(cls, kind: str, name: str, shape: Sequence[int]) -> bool:
        """Return True if a weight has this kind of state."""
        return True

    @classmethod
    def state_lengths(cls, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Return the lengths of the state vectors for weights of these shapes."""
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        return {
            key: sum(size for name, size in sizes.items() if cls.has_state(kind, name, shapes[name]))
            for kind, key in cls.states.items()
        }

    def count_floats(self, shapes: Mapping[str, Sequence[int]]) -> int:
        """Return the number of floats in its state for weights of these shapes."""
        return (
            sum(self.state_lengths(shapes).values())
            if self.states
            else self.vector_count * sum(map(math.prod, shapes.values()))
        )

    def with_precision(self, precision: str) -> Self:
        """Return the same optimizer with its own products in this precision."""
        return self

    @property
    def vector_count(self) -> int:
        """The number of floats in its state per trained element."""
        return len(self.states)

    def create_minimizer(self, x: np.ndarray) -> MinimizerState | None:
        """Return the minimizer's state at this point, or None for an elementwise rule."""
        return None


def slice_key(name: str, start: int) -> str:
    """Return the name of a weight's slice, in a step that is divided among ranks."""
    return f"{name}@{start}"


def weight_name(key: str) -> str:
    """Return the name of the weight that a key names, as a whole or a slice of it."""
    return key.partition("@")[0]


def count_dimensions(key: str, shape: Sequence[int]) -> int:
    """Return the number of dimensions of a weight; 1 for vectors of different heads or groups in the rows of a matrix."""
    return min(1, len(shape)) if weight_name(key).endswith(VECTORS) else len(shape)


@dataclass(frozen=True, kw_only=True)
class ElementwiseRule(Optimizer):
    """An optimizer whose update is part of the graph. Weight decay is decoupled."""

    extra_options = (*RATE_OPTIONS, "clip", "epochs")
    # the update takes sparse gradients: rows and their positions (`opt_rows`)
    takes_sparse_rows: ClassVar[bool] = False

    is_elementwise: ClassVar[bool] = True  # a part of a weight can be updated alone

    weight_decay: float = 0.1
    decay_min_ndim: int = 2

    def decay_for(self, weight: Tensor) -> float:
        """Return the weight decay of a weight; 0 if it has too few dimensions."""
        dimensions = count_dimensions(weight.name, weight.shape)
        return self.weight_decay if dimensions >= self.decay_min_ndim else 0.0

    def states_for(self, weight: Tensor) -> list[Tensor]:
        """Return the state tensors of a weight, in order."""
        kinds = [kind for kind in self.states if self.has_state(kind, weight.name, weight.shape)]
        return [state(f"{weight.name}.{kind}", weight.shape, weight.dtype) for kind in kinds]

    def schedule(self, step: int, rate: float) -> np.ndarray:
        """Return the content of the `schedule` input for a step (counted from 1): the rate and other numbers."""
        return np.array([rate, 1.0, 1.0], np.float32)

    def update(
        self, weight: Tensor, grad: Tensor, schedule: Tensor, factor: Tensor, *places: Tensor
    ) -> Sequence[Tensor]:
        """Return the updated weight, and any state not updated on the way to it.

        The gradient is multiplied by `factor`.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Minimizer(Optimizer):
    """An optimizer that evaluates the loss on fixed rows.

    It needs float32: rounded losses hide small decreases.
    """

    needs_f32 = True

    def create_minimizer(self, x: np.ndarray) -> MinimizerState:
        """Return the minimizer's state at this point."""
        raise NotImplementedError
