"""Inputs and metrics of preference batches."""

from typing import NamedTuple, Self, TypedDict

import numpy as np

from llamatrain.data.batches import Batch
from llamatrain.preference.loss import MISMATCHED, Objective


class PreferenceTotals(NamedTuple):
    """Sums over all micro-batches of a step; each batch contributes a share."""

    weight: float = 1.0
    answers: float = 1.0  # or pairs
    chosen_tokens: float = 1.0  # tokens of chosen answers with their prompts


VARYING_INPUTS = "shares", f"{MISMATCHED}shares"  # as long as there are tokens whose loss is asked for


def build_inputs(
    batch: Batch, objective: Objective, totals: PreferenceTotals, sparse: bool
) -> dict[str, np.ndarray]:
    """Return the preference inputs of a batch by name; if `sparse`, only tokens with a loss are included."""
    compared = batch.compared
    assert compared
    sides, total = compared.sides, np.float32(totals.answers)
    inputs = token_inputs(batch, objective, totals, sparse)
    worth = (
        sides
        if objective.compares_pairs
        else np.where(sides > 0, objective.desirable, objective.undesirable) * np.abs(sides)
    )
    inputs["worth"] = worth.astype(np.float32) / total
    if compared.others:
        inputs |= {"sides": sides, f"{MISMATCHED}part": np.abs(sides) / np.float32(max(1, compared.count))}
        mismatched = token_inputs(compared.others, objective, totals, sparse)
        mismatched |= {name: getattr(compared.others, name) for name in ("tokens", "positions", "starts")}
        inputs |= {f"{MISMATCHED}{name}": array for name, array in mismatched.items()}
    return inputs


def token_inputs(
    batch: Batch, objective: Objective, totals: PreferenceTotals, sparse: bool
) -> dict[str, np.ndarray]:
    """Return the per-token inputs of a batch by name."""
    compared = batch.compared
    assert compared
    chosen_tokens = compared.chosen if objective.kind == "orpo" else np.zeros(batch.weights.shape, bool)
    positions = (
        np.flatnonzero((batch.weights > 0) | chosen_tokens) if sparse else np.arange(batch.weights.size)
    )
    inputs = {
        "sequences": compared.sequences,
        "shares": token_shares(batch, objective),
        "targets": batch.targets,
    }
    if objective.kind == "orpo":
        inputs["words"] = chosen_tokens.astype(np.float32) / np.float32(totals.chosen_tokens)
    return {"weighed": positions, **{name: array.reshape(-1)[positions] for name, array in inputs.items()}}


def token_shares(batch: Batch, objective: Objective) -> np.ndarray:
    """Return the weight of each token in the log-probability of its answer."""
    assert batch.compared
    answers, trained = batch.compared.sequences, batch.weights > 0
    if not objective.averages_tokens:
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
    chosen_count: int = 0  # answers
    rejected_count: int = 0
    correct: int = 0  # pairs of which the chosen one has more; else answers above 0 that are good, and below that are not
    count_judged: int = 0

    @classmethod
    def from_batch(cls, batch: Batch, rewards: np.ndarray) -> Self:
        """Sum the rewards of a batch: one per answer, or those of chosen answers followed by those of
        rejected ones.
        """
        assert batch.compared
        sides, values = batch.compared.sides, rewards.astype(np.float64)
        if len(values) == len(sides):
            good, bad, correct = values[sides > 0], values[sides < 0], values * sides > 0
            return cls(
                float(good.sum()),
                float(bad.sum()),
                len(good),
                len(bad),
                int(correct.sum()),
                len(good) + len(bad),
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
