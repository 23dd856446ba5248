"""Gradient descent with momentum. The update is the graph's op `opt_step_sgd`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from llamatrain.graph.ops import opt_step_sgd
from llamatrain.graph.tensor import Tensor
from llamatrain.optim.optimizer import ElementwiseRule


@dataclass(frozen=True, kw_only=True)
class SGD(ElementwiseRule):
    """Gradient descent with momentum."""

    checkpoint_name = "sgd"
    states: ClassVar = {"m": "momentum"}
    options: ClassVar = {"momentum": "beta1"}
    takes_sparse_rows = True

    momentum: float = 0.9

    def update(
        self, weight: Tensor, grad: Tensor, schedule: Tensor, factor: Tensor, *places: Tensor
    ) -> Sequence[Tensor]:
        """Return the updated weight."""
        inputs = (weight, *self.states_for(weight), grad, schedule, factor, *places)
        decay = self.decay_for(weight)
        return opt_step_sgd(*inputs, momentum=self.momentum, decay=decay)[:1]


OPTIMIZER = SGD
