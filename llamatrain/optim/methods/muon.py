"""Muon (Jordan et al. 2024): the momentum of each matrix of a block is made orthogonal by five Newton-Schulz products, so that a
step moves all of its directions alike. Embeddings, output and norms are changed by AdamW.

A step is scaled by 0.2 sqrt(the longer side), after which it is as large as AdamW's usually are: rate and weight decay are the
same for both (Liu et al. 2025).
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

A, B, C = 3.4445, -4.7750, 2.0315  # of the polynomial: all singular values come near 1, and soon
PRODUCTS = 5
TINY = 1e-7  # beside the norm
SIZE = 0.2  # of an element of AdamW's steps, in rates


@dataclass(frozen=True, kw_only=True)
class Muon(AdamW):
    kept_as = "muon"
    options: ClassVar = {"momentum": None, "half": None}
    whole = True
    apart = False

    momentum: float = 0.95
    half: bool = False  # its products are in bf16

    @classmethod
    def holds(cls, kind: str, name: str, shape: Sequence[int]) -> bool:
        return kind == "m" or not is_matrix(name, shape)

    def in_precision(self, precision: str) -> Self:
        return replace(self, half=precision == "bf16")

    def step(
        self, weight: Tensor, grad: Tensor, schedule: Tensor, factor: Tensor, *places: Tensor
    ) -> Sequence[Tensor]:
        if not is_matrix(weight.name, weight.shape):
            return super().step(weight, grad, schedule, factor, *places)
        carried = opt_momentum(*self.beside(weight), grad, factor, momentum=self.momentum)
        ahead = opt_ahead(carried, grad, factor, momentum=self.momentum)
        change, size = newton_schulz(ahead, self.half), SIZE * max(weight.shape) ** 0.5
        return [opt_step(weight, change, schedule, by=size, decay=self.decay(weight))]


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Of a block."""
    return name.startswith("blk.") and len(shape) == 2


def newton_schulz(x: Tensor, half: bool = False) -> Tensor:
    """x = u s vᵀ -> nearly u vᵀ: x, divided by its norm, becomes a x + (b xxᵀ + c (xxᵀ)²) x, again and again. Where x is tall it
    is xᵀx, behind x, so that the smaller of both is squared."""

    def rounded(tensor: Tensor) -> Tensor:
        return cast(tensor, dtype=BF16) if half else tensor

    tall = x.shape[0] > x.shape[1]
    x = opt_unit(x, sum_sqr(x), eps=TINY)
    for _ in range(PRODUCTS):
        own = rounded(x)
        square = out_prod(own, own) if tall else matmul(own, own)
        twice = rounded(square)
        factor = rounded(opt_blend(square, matmul(twice, twice), a=B, b=C))
        x = opt_blend(x, matmul_nn(own, factor) if tall else matmul_nn(factor, own), a=A, b=1.0)
    return x


OPTIMIZER = Muon
