"""Gradient descent with momentum; the update itself is the graph's op `opt_step_sgd`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from llamatrain.graph.ops import opt_step_sgd
from llamatrain.graph.tensor import Tensor
from llamatrain.optim.optimizer import Gradient, StepRule


@dataclass(frozen=True, kw_only=True)
class SGD(StepRule):
    kept_as = "sgd"
    states: ClassVar = {"m": "momentum"}
    options: ClassVar = {"momentum": "beta1"}

    momentum: float = 0.9

    def step(self, weight: Tensor, grad: Gradient, schedule: Tensor, factor: Tensor) -> Sequence[Tensor]:
        (g, *places), decay = grad, self.decay(weight)
        given = (weight, *self.beside(weight), g, schedule, factor, *places)
        return opt_step_sgd(*given, momentum=self.momentum, decay=decay)[:1]


OPTIMIZER = SGD
