"""What an optimizer says of itself, so that nobody else names one. Each is a file of methods/.

A StepRule changes each weight by its gradient in the graph, at a rate. A Minimizer goes from point to point of all weights
together, by whole evaluations of loss and gradient.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from llamatrain.graph.tensor import Tensor, state

Evaluate = Callable[[np.ndarray], tuple[float, np.ndarray]]  # point -> loss, gradient
Values = Mapping[
    str, Any
]  # arrays and numbers by their names in a checkpoint, without what stands before all of them
RATE_OPTIONS = ("lr", "lr_min", "warmup", "schedule", "decay_steps", "restart_growth", "lora_plus_ratio")


class MinimizerState(Protocol):
    """Where a minimizer stands: point, loss and gradient belong together, after a failed step too."""

    x: np.ndarray
    loss: float  # NaN before `begin`
    gradient: np.ndarray
    evaluations: int
    iteration: int  # on these rows
    length: float  # of the last step, in directions

    def begin(self, evaluate: Evaluate) -> None:
        """Loss and gradient of the first point."""

    def step(self, evaluate: Evaluate) -> str | None:
        """One whole iteration, or why there can be none. Left half way, nothing has changed."""

    def restart(self) -> None:
        """Begin anew from this point, on other rows."""

    def state_values(self) -> dict[str, Any]:
        """All that goes on to the next iteration; arrays are its own, not copies."""

    def restore(self, kept: Values) -> None:
        """Go on from there; from the start where nothing was kept."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Its fields are said by the options of their names."""

    checkpoint_name: ClassVar[
        str
    ]  # optimizer.type in a checkpoint, where its tensors and numbers are called optimizer.<kept_as>.*
    states: ClassVar[
        Mapping[str, str]
    ] = {}  # vectors beside the weights: what their leaves' names end in, and theirs there
    nonnegative: ClassVar[Collection[str]] = ()  # of what is kept: tensors without values below 0
    full_models_only: ClassVar[bool] = False  # whether it is for models, and not for the factors of adapters
    needs_f32: ClassVar[bool] = (
        False  # whether it is for float32: products in bf16 are taken only where they are asked for
    )
    options: ClassVar[
        Mapping[str, str | None]
    ] = {}  # of fields with an option of another name, or with none: that name
    extra_options: ClassVar[
        Collection[str]
    ] = ()  # options that are for some optimizers only, and say no field

    @classmethod
    def field_options(cls) -> dict[str, str]:
        """Its fields, and the options that say them."""
        names = {field.name: cls.options.get(field.name, field.name) for field in fields(cls)}
        return {field: option for field, option in names.items() if option}

    @classmethod
    def from_options(cls, values: Mapping[str, Any]) -> Self:
        """By the values of options."""
        return cls(
            **{field: values[option] for field, option in cls.field_options().items() if option in values}
        )

    @classmethod
    def used_options(cls) -> tuple[str, ...]:
        """The options that have an effect, of those that do not with every optimizer."""
        return (*cls.extra_options, *cls.field_options().values())

    @classmethod
    def checkpoint_key(cls, name: str) -> str:
        return f"optimizer.{cls.checkpoint_name}.{name}"

    @classmethod
    def required_shapes(cls, kept: Values, size: int) -> dict[str, tuple[int, ...]]:
        """The tensors that it cannot go on without, where so many elements are trained."""
        return dict.fromkeys(cls.states.values(), (size,))

    @classmethod
    def state_problem(cls, kept: Values) -> str | None:
        """Why it cannot go on from there, though the tensors have these shapes."""

    @classmethod
    def has_state(cls, kind: str, name: str, shape: Sequence[int]) -> bool:
        """Whether a weight has this state."""
        return True

    @classmethod
    def state_lengths(cls, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Of the vectors of its states, where weights of these shapes are trained."""
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        return {
            kept: sum(size for name, size in sizes.items() if cls.has_state(kind, name, shapes[name]))
            for kind, kept in cls.states.items()
        }

    def count_floats(self, shapes: Mapping[str, Sequence[int]]) -> int:
        """How many it holds for weights of these shapes."""
        return (
            sum(self.state_lengths(shapes).values())
            if self.states
            else self.vector_count * sum(map(math.prod, shapes.values()))
        )

    def with_precision(self, precision: str) -> Self:
        """The same, with products of its own in this precision."""
        return self

    @property
    def vector_count(self) -> int:
        """How many floats it holds for each that is trained."""
        return len(self.states)

    def create_minimizer(self, x: np.ndarray) -> MinimizerState | None:
        """From this point, if it is a minimizer."""
        return None


@dataclass(frozen=True, kw_only=True)
class ElementwiseRule(Optimizer):
    """Decoupled decay, only for tensors of enough dimensions."""

    extra_options = (*RATE_OPTIONS, "clip", "epochs")
    takes_sparse_rows: ClassVar[bool] = (
        False  # whether its step takes a gradient of few rows as these, and all rows' places (`opt_rows`)
    )

    is_elementwise: ClassVar[bool] = True  # whether a part of a weight can be changed without the rest of it

    weight_decay: float = 0.1
    decay_min_ndim: int = 2

    def decay_for(self, weight: Tensor) -> float:
        return self.weight_decay if len(weight.shape) >= self.decay_min_ndim else 0.0

    def states_for(self, weight: Tensor) -> list[Tensor]:
        """Its states, in their order."""
        kinds = [kind for kind in self.states if self.has_state(kind, weight.name, weight.shape)]
        return [state(f"{weight.name}.{kind}", weight.shape, weight.dtype) for kind in kinds]

    def schedule(self, step: int, rate: float) -> np.ndarray:
        """What the graph's `schedule` input holds in a step, counted from 1: the rate, and numbers of its own."""
        return np.array([rate, 1.0, 1.0], np.float32)

    def update(
        self, weight: Tensor, grad: Tensor, schedule: Tensor, factor: Tensor, *places: Tensor
    ) -> Sequence[Tensor]:
        """The weight, and what else is not on its way, changed in place by the gradient times the factor."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Minimizer(Optimizer):
    """Its rows are the same in every step; what it needs is a descent. Rounded losses say too little of where they fall."""

    needs_f32 = True

    def create_minimizer(self, x: np.ndarray) -> MinimizerState:
        raise NotImplementedError
