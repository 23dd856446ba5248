"""Inputs and metrics of preference batches."""

from typing import NamedTuple, Self, TypedDict

import numpy as np

from llamatrain.data.batches import Batch
from llamatrain.preference.loss import OTHERS, Objective


class PreferenceTotals(NamedTuple):
    """Sums over all micro-batches of a step; each batch contributes a share."""

    weight: float = 1.0
    answers: float = 1.0  # or pairs
    words: float = 1.0  # tokens of chosen answers with their prompts


VARYING = "shares", f"{OTHERS}shares"  # as long as there are tokens whose loss is asked for


def told_of(
    batch: Batch, objective: Objective, totals: PreferenceTotals, sparse: bool
) -> dict[str, np.ndarray]:
    """Return the preference inputs of a batch by name; if `sparse`, only tokens with a loss are included."""
    compared = batch.compared
    assert compared
    sides, total = compared.sides, np.float32(totals.answers)
    told = tokens_of(batch, objective, totals, sparse)
    worth = (
        sides
        if objective.pairs
        else np.where(sides > 0, objective.desirable, objective.undesirable) * np.abs(sides)
    )
    told["worth"] = worth.astype(np.float32) / total
    if compared.others:
        told |= {"sides": sides, f"{OTHERS}part": np.abs(sides) / np.float32(max(1, compared.count))}
        others = tokens_of(compared.others, objective, totals, sparse)
        others |= {name: getattr(compared.others, name) for name in ("tokens", "positions", "starts")}
        told |= {f"{OTHERS}{name}": each for name, each in others.items()}
    return told


def tokens_of(
    batch: Batch, objective: Objective, totals: PreferenceTotals, sparse: bool
) -> dict[str, np.ndarray]:
    """Return the per-token inputs of a batch by name."""
    compared = batch.compared
    assert compared
    words = compared.chosen if objective.kind == "orpo" else np.zeros(batch.weights.shape, bool)
    weighed = np.flatnonzero((batch.weights > 0) | words) if sparse else np.arange(batch.weights.size)
    told = {"sequences": compared.sequences, "shares": shares_of(batch, objective), "targets": batch.targets}
    if objective.kind == "orpo":
        told["words"] = words.astype(np.float32) / np.float32(totals.words)
    return {"weighed": weighed, **{name: each.reshape(-1)[weighed] for name, each in told.items()}}


def shares_of(batch: Batch, objective: Objective) -> np.ndarray:
    """Return the weight of each token in the log-probability of its answer."""
    assert batch.compared
    answers, trained = batch.compared.sequences, batch.weights > 0
    if not objective.averages:
        return trained.astype(np.float32)
    counts = np.bincount(answers[trained], minlength=int(answers.max()) + 1)
    return np.where(trained, 1 / np.maximum(counts, 1)[answers], 0).astype(np.float32)


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
    good: int = 0  # answers
    bad: int = 0
    right: int = 0  # pairs of which the chosen one has more; else answers above 0 that are good, and below that are not
    judged: int = 0

    @classmethod
    def of(cls, batch: Batch, rewards: np.ndarray) -> Self:
        """Sum the rewards of a batch: one per answer, or those of chosen answers followed by those of
        rejected ones.
        """
        assert batch.compared
        sides, values = batch.compared.sides, rewards.astype(np.float64)
        if len(values) == len(sides):
            good, bad, right = values[sides > 0], values[sides < 0], values * sides > 0
            return cls(
                float(good.sum()),
                float(bad.sum()),
                len(good),
                len(bad),
                int(right.sum()),
                len(good) + len(bad),
            )
        chosen, rejected = (half[sides > 0] for half in np.split(values, 2))
        count = len(chosen)
        return cls(
            float(chosen.sum()), float(rejected.sum()), count, count, int((chosen > rejected).sum()), count
        )

    def plus(self, other: "Rewards") -> "Rewards":
        """Return the sum with another batch's rewards."""
        return Rewards._make(one + another for one, another in zip(self, other, strict=True))

    @property
    def facts(self) -> PreferenceMetrics:
        """The metrics, with None for what cannot be computed."""
        chosen = self.chosen / self.good if self.good else None
        rejected = self.rejected / self.bad if self.bad else None
        margin = chosen - rejected if chosen is not None and rejected is not None else None
        right = self.right / self.judged if self.judged else None
        return PreferenceMetrics(
            margin=margin, accuracy=right, reward_chosen=chosen, reward_rejected=rejected
        )
