"""The methods that merge models, and a recipe: one of them with its numbers.

linear            Σ wᵢ Wᵢ / Σ wᵢ (Wortsman et al. 2022, model soups)
slerp             between two models along the arc from one to the other (Shoemake 1985)
task-arithmetic   W₀ + λ Σ wᵢ (Wᵢ - W₀), with a base W₀ (Ilharco et al. 2023)
ties              of each difference Wᵢ - W₀ only the largest values are kept; then, for each weight, only
                  the models whose sign has the larger sum are averaged (Yadav et al. 2023)
dare-linear       of each difference, values are dropped at random, and the others are divided by the share
                  that is kept (Yu et al. 2024)
dare-ties         the same, with the signs of ties
"""

from dataclasses import dataclass
from typing import Literal

MethodName = Literal["linear", "slerp", "task-arithmetic", "ties", "dare-linear", "dare-ties"]


@dataclass(frozen=True, slots=True)
class TaskMethod:
    """A method that adds differences from a base."""

    keeps: Literal["all", "largest", "random"]  # values of a difference
    elects_signs: bool
    normalizes: bool  # by default


TASK_METHODS: dict[str, TaskMethod] = {
    "task-arithmetic": TaskMethod("all", elects_signs=False, normalizes=False),
    "ties": TaskMethod("largest", elects_signs=True, normalizes=True),
    "dare-linear": TaskMethod("random", elects_signs=False, normalizes=False),
    "dare-ties": TaskMethod("random", elects_signs=True, normalizes=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model in a merge."""

    number: int  # its place among the models, which chooses its random numbers
    weight: float
    density: float  # the share of its difference that is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A method with its numbers. Models whose weight is 0 are not among the sources."""

    method: MethodName
    sources: tuple[Source, ...]
    normalize: bool  # divide by the sum of the weights
    scale: float = 1.0  # λ, by which a sum of differences is multiplied
    seed: int = 0

    @property
    def needs_base(self) -> bool:
        """True if the method adds differences from a base."""
        return self.method in TASK_METHODS

    @property
    def keeps_equal(self) -> bool:
        """True if a tensor that is the same in all models is the same in the result."""
        weights = [source.weight for source in self.sources]
        return self.needs_base or self.method == "slerp" or self.normalize or sum(weights) == 1
