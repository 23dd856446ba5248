"""Totals and metrics of preference batches."""

from typing import NamedTuple, Self, TypedDict

import numpy as np

from llamatrain.data.batches import Batch


class PreferenceMetrics(TypedDict):
    """The metrics of a step or a validation."""

    margin: float | None
    accuracy: float | None
    reward_chosen: float | None
    reward_rejected: float | None


class Rewards(NamedTuple):
    """Sums of rewards over answers of each kind; they add up over batches."""

    chosen: float = 0.0
    rejected: float = 0.0
    chosen_count: int = 0  # answers
    rejected_count: int = 0
    # pairs of which the chosen one has more; else answers above 0 that are good, and below that are not
    correct: int = 0
    count_judged: int = 0

    @classmethod
    def from_batch(cls, batch: Batch, rewards: np.ndarray) -> Self:
        """Sum the rewards of a batch.

        There is one per answer, or those of chosen answers are followed by those of rejected ones.
        """
        assert batch.answers
        sides, values = batch.answers.sides, rewards.astype(np.float64)
        if len(values) == len(sides):
            chosen_values, rejected_values, correct = values[sides > 0], values[sides < 0], values * sides > 0
            return cls(
                float(chosen_values.sum()),
                float(rejected_values.sum()),
                len(chosen_values),
                len(rejected_values),
                int(correct.sum()),
                len(chosen_values) + len(rejected_values),
            )
        chosen, rejected = (half[sides > 0] for half in np.split(values, 2))
        count = len(chosen)
        return cls(
            float(chosen.sum()), float(rejected.sum()), count, count, int((chosen > rejected).sum()), count
        )

    def plus(self, other: "Rewards") -> "Rewards":
        """Return the sum with another batch's rewards."""
        return Rewards._make(own + added for own, added in zip(self, other, strict=True))

    @property
    def metrics(self) -> PreferenceMetrics:
        """The metrics, with None for what cannot be computed."""
        chosen = self.chosen / self.chosen_count if self.chosen_count else None
        rejected = self.rejected / self.rejected_count if self.rejected_count else None
        margin = chosen - rejected if chosen is not None and rejected is not None else None
        accuracy = self.correct / self.count_judged if self.count_judged else None
        return PreferenceMetrics(
            margin=margin, accuracy=accuracy, reward_chosen=chosen, reward_rejected=rejected
        )
