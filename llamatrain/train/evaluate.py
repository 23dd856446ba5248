"""Measures the loss and accuracy of a model on data, batch by batch.

The loss is the weighted sum over tokens divided by the sum of the weights. Its standard error is that of a
ratio over independent units: a row of text, a sample of any other data, a pair, or an answer that is judged
alone. So neither the batch size nor packing changes it. The standard error of the accuracy is that of a share
of the tokens.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from llamatrain.data.batches import Batch
from llamatrain.distributed.comm import Comm
from llamatrain.preference.batch import Rewards
from llamatrain.report.records import Score
from llamatrain.train.programs import EvalPrograms
from llamatrain.train.protocols import InputChanged, TrainingInterrupted


class BatchLoss(NamedTuple):
    """The summed loss of a batch, and of each unit: (units, 2), loss and weight."""

    loss: float
    weight: float
    tokens: int
    right: int | None
    units: np.ndarray
    rewards: Rewards | None = None  # of answers that are compared
    words: tuple[float, float, np.ndarray] | None = (
        None  # of chosen answers: loss, tokens, and both of each unit
    )


def judged(runner: EvalPrograms, batch: Batch) -> BatchLoss:
    """Run a batch through the evaluation program and return its losses."""
    (loss, right), tokens = runner.judged(batch), int(np.count_nonzero(batch.weights))
    if batch.compared and (rewards := runner.rewards(batch)):
        there = np.flatnonzero(batch.compared.sides)
        parts, words = [part[there] for part in runner.parts()], None
        if len(parts) > 1:
            counts = np.bincount(batch.compared.sequences[batch.compared.chosen], minlength=len(there))
            words = (runner.terms()[1], float(batch.compared.words), units_of(parts[1], counts))
        return BatchLoss(
            loss, batch.compared.count, tokens, None, units_of(parts[0], np.ones(len(there))), rewards, words
        )
    weight = float(batch.weights.sum(dtype=np.float64))
    return BatchLoss(loss, weight, tokens, right, units_in(batch, runner.token_losses(batch)))


def units_of(losses: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Stack losses and weights of units to (units, 2) in float64."""
    return np.stack([losses.astype(np.float64), weights.astype(np.float64)], axis=1)


def units_in(batch: Batch, losses: np.ndarray) -> np.ndarray:
    """Sum the losses of each sample's tokens; `losses` has one entry per token with a weight."""
    chosen = np.flatnonzero(batch.weights)
    rows, length = batch.starts.shape
    begins = (np.arange(rows)[:, None] * length + batch.starts).reshape(-1)[chosen]
    _, samples = np.unique(begins, return_inverse=True)
    return units_of(
        *(
            np.bincount(samples, each.astype(np.float64))
            for each in (losses, batch.weights.reshape(-1)[chosen])
        )
    )


def judged_by_all(
    world: Comm, mine: Iterator[BatchLoss], asked: Callable[[], int] = int
) -> Iterator[BatchLoss]:
    """Yield the batch losses of all ranks in order; each rank evaluates every n-th batch.

    If a signal or a changed input reaches one rank, the error is raised on every rank.
    """
    while True:
        one, changed = None, ""  # what has befallen one has befallen all
        try:
            one = next(mine, None)
        except InputChanged as error:
            changed = str(error)
        told = world.gathered((one, asked(), changed))
        if found := next((changed for *_, changed in told if changed), ""):
            raise InputChanged(found)
        if signal := next((signal for _, signal, _ in told if signal), 0):
            raise TrainingInterrupted(signal)
        yield from (each for each, *_ in told if each)
        if not all(each for each, *_ in told):
            return


@dataclass
class LossMeter:
    """Accumulates batch losses into a score."""

    losses: list[float] = field(default_factory=list)  # of batches, sums
    weights: list[float] = field(default_factory=list)
    tokens: int = 0
    right: int | None = 0
    rewards: Rewards | None = None
    units: list[np.ndarray] = field(default_factory=list)
    words: list[tuple[float, float, np.ndarray]] = field(default_factory=list)

    def add(self, one: BatchLoss) -> None:
        """Add the losses of a batch."""
        self.losses.append(one.loss)
        self.weights.append(one.weight)
        self.units.append(one.units)
        self.tokens += one.tokens
        if one.rewards:
            self.rewards = self.rewards.plus(one.rewards) if self.rewards else one.rewards
            self.words += [one.words] if one.words else []
            return
        self.right = None if one.right is None or self.right is None else self.right + one.right

    @property
    def score(self) -> Score:
        """The mean loss and accuracy so far, with their standard errors."""
        if self.rewards:
            return self._compared(self.rewards)
        total, tokens = math.fsum(self.weights), self.tokens
        loss = math.fsum(self.losses) / total
        accuracy = spread = None
        error = error_of(apart_from(loss, total, self.units))
        if self.right is not None and math.isfinite(loss):
            accuracy = self.right / tokens
            spread = math.sqrt(accuracy * (1 - accuracy) / (tokens - 1)) if tokens > 1 else None
        return Score(loss=loss, loss_error=error, accuracy=accuracy, accuracy_error=spread, tokens=tokens)

    def _compared(self, rewards: Rewards) -> Score:
        """Return the score of preference data: the sum of the terms' means, with a joint standard error."""
        kinds = [(self.losses, self.weights, self.units)]
        if self.words:
            sums, counts, units = zip(*self.words, strict=True)
            kinds.append(([*sums], [*counts], [*units]))
        loss, apart = 0.0, np.zeros(1)
        for sums, counts, units in kinds:
            total = math.fsum(counts)
            mean = math.fsum(sums) / total
            loss, apart = loss + mean, apart + apart_from(mean, total, units)
        facts, error = rewards.facts, error_of(apart)
        right, judged = facts["accuracy"], rewards.judged
        spread = math.sqrt(right * (1 - right) / (judged - 1)) if right is not None and judged > 1 else None
        return Score(
            loss=loss, loss_error=error, accuracy_error=spread, tokens=self.tokens, answers=judged, **facts
        )


def apart_from(mean: float, total: float, units: Sequence[np.ndarray]) -> np.ndarray:
    """Return each unit's contribution to the deviation of a weighted mean; `total` is the sum of the weights."""
    losses, weights = np.concatenate(units).T
    return (losses - mean * weights) / total


def error_of(apart: np.ndarray) -> float | None:
    """Return the standard error of a mean from its units' deviations; None with fewer than two units."""
    count = len(apart)
    if count < 2 or not np.isfinite(apart).all():
        return None
    return math.sqrt(math.fsum(apart**2) * count / (count - 1))
