"""The arrays of the inputs of a preference graph, by input name."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from llamatrain.data.batches import Batch, PreferenceBatch, StepTotals
from llamatrain.preference.forward import MISMATCHED
from llamatrain.preference.objective import Objective


@dataclass(frozen=True, kw_only=True)
class InputSource:
    """A batch, and what else the arrays of its inputs depend on."""

    batch: Batch
    totals: StepTotals
    drops_untrained: bool  # only tokens with a loss are given to the output weight
    objective: Objective | None = None
    dropout_key: tuple[int, int] = (0, 0)

    @property
    def answers(self) -> PreferenceBatch:
        """The answers that tokens belong to."""
        assert self.batch.answers
        return self.batch.answers

    @cached_property
    def trained_chosen(self) -> np.ndarray:
        """The tokens of chosen answers whose cross entropy is trained: bool (rows, length)."""
        if self.objective and self.objective.trains_chosen:
            return self.answers.chosen
        return np.zeros(self.batch.weights.shape, bool)

    @cached_property
    def scored_indices(self) -> np.ndarray:
        """The indices in the flattened batch of the tokens whose loss is computed."""
        if not self.drops_untrained:
            return np.arange(self.batch.weights.size)
        return np.flatnonzero((self.batch.weights != 0) | self.trained_chosen)

    @cached_property
    def mismatched(self) -> "InputSource":
        """The same prompts with the answers of other prompts."""
        assert self.answers.others
        return InputSource(
            batch=self.answers.others,
            totals=self.totals,
            drops_untrained=self.drops_untrained,
            objective=self.objective,
        )

    @property
    def scored_tokens(self) -> int:
        """The number of tokens whose loss is computed, in the larger of both batches."""
        others = self.batch.answers.others if self.batch.answers else None
        return max(len(self.scored_indices), len(self.mismatched.scored_indices) if others else 0)

    def take(self, array: np.ndarray) -> np.ndarray:
        """Return a per-token array at the scored indices."""
        return array.reshape(-1)[self.scored_indices]


InputFunction = Callable[[InputSource], np.ndarray]


def token_shares(source: InputSource) -> np.ndarray:
    """Return the weight of each token in the log-probability of its answer."""
    assert source.objective
    answers, trained = source.answers.sequences, source.batch.weights > 0
    if not source.objective.averages_tokens:
        return trained.astype(np.float32)
    counts = np.bincount(answers[trained], minlength=int(answers.max()) + 1)
    return np.where(trained, 1 / np.maximum(counts, 1)[answers], 0).astype(np.float32)


def chosen_shares(source: InputSource) -> np.ndarray:
    """Return the weight of each token of a chosen answer in the cross entropy."""
    return source.trained_chosen.astype(np.float32) / np.float32(source.totals.chosen_tokens)


def unit_weights(source: InputSource) -> np.ndarray:
    """Return the weight of each pair or answer in the loss."""
    assert source.objective
    weights = source.objective.unit_weights(source.answers.sides)
    return weights.astype(np.float32) / np.float32(source.totals.answers)


def mismatched_shares(source: InputSource) -> np.ndarray:
    """Return the weight of each mismatched answer in their mean."""
    return np.abs(source.answers.sides) / np.float32(max(1, source.answers.count))


PREFERENCE_INPUTS: dict[str, InputFunction] = {
    "sequences": lambda source: source.take(source.answers.sequences),
    "shares": lambda source: source.take(token_shares(source)),
    "chosen_tokens": lambda source: source.take(chosen_shares(source)),
    "unit_weights": unit_weights,
    "sides": lambda source: source.answers.sides,
    f"{MISMATCHED}mismatched_shares": mismatched_shares,
}


def for_mismatched(function: InputFunction) -> InputFunction:
    """Return the function of the same input for the mismatched answers."""
    return lambda source: function(source.mismatched)
