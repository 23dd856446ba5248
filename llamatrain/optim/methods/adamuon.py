"""AdaMuon (Si et al. 2025): Muon whose steps are divided by the root of their own second moments.

Both bring every part of a matrix forward: Newton-Schulz iterations all directions, the division all elements.
Then the step is scaled so that its root mean square is 0.2 times the rate, as AdamW's usually is. Momenta are
orthogonalized as they are: their signs, as in the paper, learned slower (3.42 against 3.35 after 1.2 million
tokens of the King James Bible).

Only matrices of blocks decay. All other weights are trained by AdamW with betas of 0.6 and 0.95, and the rate of
the output is three times theirs, which was best for models of widths 64, 128 and 256.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from llamatrain.graph.ops import (
    fill,
    join_columns,
    mul,
    opt_adapt,
    opt_ahead,
    opt_momentum,
    opt_step,
    opt_unit,
    sum_sqr,
)
from llamatrain.graph.tensor import Tensor
from llamatrain.optim.methods.adamw import AdamW
from llamatrain.optim.methods.muon import EPSILON, SCALE, Muon, is_block_matrix, newton_schulz
from llamatrain.optim.optimizer import weight_name

OUTPUT_RATIO = 3.0  # rate of the output matrix, relative to all other weights
LEAST_ROOT = 1e-6  # added to the roots of second moments


@dataclass(frozen=True, kw_only=True)
class AdaMuon(Muon):
    """AdaMuon for matrices of blocks, AdamW for all other weights."""

    checkpoint_name = "adamuon"
    options: ClassVar = {"momentum": None, "variance": None, "bf16": None}

    momentum: float = 0.9
    variance: float = 0.95  # share of the second moments that a step keeps
    beta1: float = 0.6
    beta2: float = 0.95

    @classmethod
    def has_state(cls, kind: str, name: str, shape: Sequence[int]) -> bool:
        """Return True: every weight has both moments."""
        return True

    def decay_for(self, weight: Tensor) -> float:
        """Return the weight decay of a weight; 0 unless it is a matrix of a block."""
        return super().decay_for(weight) if is_block_matrix(weight.name, weight.shape) else 0.0

    def update(
        self, weight: Tensor, grad: Tensor, schedule: Tensor, factor: Tensor, *places: Tensor
    ) -> Sequence[Tensor]:
        """Return the updated weight and second moments."""
        if not is_block_matrix(weight.name, weight.shape):
            faster = weight_name(weight.name) == "output.weight"
            return AdamW.update(
                self, weight, grad, scale_rate(schedule) if faster else schedule, factor, *places
            )
        first, second = self.states_for(weight)
        carried = opt_momentum(first, grad, factor, momentum=self.momentum)
        nesterov = opt_ahead(carried, grad, factor, momentum=self.momentum)
        second, change = opt_adapt(
            second, newton_schulz(nesterov, self.bf16), beta=self.variance, eps=LEAST_ROOT
        )
        change, size = opt_unit(change, sum_sqr(change), eps=EPSILON), SCALE * weight.size**0.5
        return [opt_step(weight, change, schedule, by=size, decay=self.decay_for(weight)), second]


def scale_rate(schedule: Tensor) -> Tensor:
    """Return a schedule with the rate of the output."""
    rest = fill(shape=(schedule.shape[0] - 1,), value=1.0)
    return mul(schedule, join_columns(fill(shape=(1,), value=OUTPUT_RATIO), rest))


OPTIMIZER = AdaMuon
