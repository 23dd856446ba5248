"""AdamW (Loshchilov and Hutter 2017). The update is the graph's op `opt_step_adamw`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from llamatrain.graph.ops import opt_step_adamw
from llamatrain.graph.tensor import Tensor
from llamatrain.optim.optimizer import ElementwiseRule


@dataclass(frozen=True, kw_only=True)
class AdamW(ElementwiseRule):
    """AdamW."""

    checkpoint_name = "adam"
    states: ClassVar = {"m": "first_moments", "v": "second_moments"}
    nonnegative = ("second_moments",)
    takes_sparse_rows = True

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def schedule(self, step: int, rate: float) -> np.ndarray:
        """Return the rate and both bias corrections."""
        return np.array([rate, 1.0 - self.beta1**step, 1.0 - self.beta2**step], np.float32)  # (3,)

    def update(
        self, weight: Tensor, grad: Tensor, schedule: Tensor, factor: Tensor, *places: Tensor
    ) -> Sequence[Tensor]:
        """Return the updated weight."""
        inputs = (weight, *self.states_for(weight), grad, schedule, factor, *places)
        decay = self.decay_for(weight)
        return opt_step_adamw(*inputs, beta1=self.beta1, beta2=self.beta2, eps=self.eps, decay=decay)[:1]


OPTIMIZER = AdamW
