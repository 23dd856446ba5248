"""Muon (Jordan et al. 2024): the momentum of each block matrix is orthogonalized by five Newton-Schulz iterations.

So a step moves all its directions alike. Embeddings, output and norms are updated by AdamW. A step is scaled
by 0.2 sqrt(longer side), which makes it as large as AdamW's usually are: rate and weight decay are the same
for both (Liu et al. 2025).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from llamatrain.graph.ops import (
    cast,
    matmul,
    matmul_nn,
    opt_ahead,
    opt_blend,
    opt_momentum,
    opt_step,
    opt_unit,
    out_prod,
    sum_sqr,
)
from llamatrain.graph.tensor import BF16, Tensor
from llamatrain.optim.methods.adamw import AdamW
from llamatrain.optim.optimizer import count_dimensions, weight_name

A, B, C = 3.4445, -4.7750, 2.0315  # of the polynomial, which quickly brings singular values near 1
ITERATIONS = 5
EPSILON = 1e-7  # added to the norm
SCALE = 0.2  # size of an element of AdamW's steps, relative to the rate


@dataclass(frozen=True, kw_only=True)
class Muon(AdamW):
    """Muon for matrices of blocks, AdamW for all other weights."""

    checkpoint_name = "muon"
    options: ClassVar = {"momentum": None, "bf16": None}
    full_models_only = True
    is_elementwise = False

    momentum: float = 0.95
    bf16: bool = False  # compute products in bf16

    @classmethod
    def has_state(cls, kind: str, name: str, shape: Sequence[int]) -> bool:
        """Return True if a weight has this state; matrices have only momentum."""
        return kind == "m" or not is_block_matrix(name, shape)

    def with_precision(self, precision: str) -> Self:
        """Return the same optimizer with its products in bf16 or float32."""
        return replace(self, bf16=precision == "bf16")

    def update(
        self, weight: Tensor, grad: Tensor, schedule: Tensor, factor: Tensor, *places: Tensor
    ) -> Sequence[Tensor]:
        """Return the updated weight."""
        if not is_block_matrix(weight.name, weight.shape):
            return super().update(weight, grad, schedule, factor, *places)
        carried = opt_momentum(*self.states_for(weight), grad, factor, momentum=self.momentum)
        nesterov = opt_ahead(carried, grad, factor, momentum=self.momentum)
        change, size = newton_schulz(nesterov, self.bf16), SCALE * max(weight.shape) ** 0.5
        return [opt_step(weight, change, schedule, by=size, decay=self.decay_for(weight))]


def is_block_matrix(key: str, shape: Sequence[int]) -> bool:
    """Return True for a matrix of a block; the taps of a convolution are none, and vectors in rows neither."""
    name = weight_name(key)
    is_taps = name.endswith(("conv.weight", "conv1d.weight"))
    return name.startswith("blk.") and count_dimensions(name, shape) == 2 and not is_taps


def newton_schulz(x: Tensor, bf16: bool = False) -> Tensor:
    """Return nearly u vᵀ for x = u s vᵀ.

    x, divided by its norm, becomes a x + (b xxᵀ + c (xxᵀ)²) x, repeatedly. For a tall x it is xᵀx, behind x,
    so that the smaller product is squared.
    """

    def rounded(tensor: Tensor) -> Tensor:
        """Round to bf16 if the products are in bf16."""
        return cast(tensor, dtype=BF16) if bf16 else tensor

    tall = x.shape[0] > x.shape[1]
    x = opt_unit(x, sum_sqr(x), eps=EPSILON)
    for _ in range(ITERATIONS):
        own = rounded(x)
        square = out_prod(own, own) if tall else matmul(own, own)
        twice = rounded(square)
        factor = rounded(opt_blend(square, matmul(twice, twice), a=B, b=C))
        x = opt_blend(x, matmul_nn(own, factor) if tall else matmul_nn(factor, own), a=A, b=1.0)
    return x


OPTIMIZER = Muon
