"""Measures the loss and accuracy of a model on data, batch by batch.

The loss is the weighted sum over tokens divided by the sum of the weights. Its standard error is that of a
ratio over independent units: a row of text, a sample of any other data, a pair, or an answer that is judged
alone. So neither the batch size nor packing changes it. The standard error of the accuracy is that of a share
of the tokens.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from llamatrain.data.batches import Batch
from llamatrain.distributed.comm import Comm
from llamatrain.grpo.metrics import RolloutStats
from llamatrain.preference.batch import Rewards
from llamatrain.report.records import Score
from llamatrain.rewards.processes import RewardError, shared_reward_error
from llamatrain.train.programs import EvalPrograms
from llamatrain.train.protocols import InputChanged, TrainingInterrupted

T = TypeVar("T")


class BatchLoss(NamedTuple):
    """The summed loss of a batch, and of each unit: (units, 2), loss and weight."""

    loss: float
    weight: float
    tokens: int
    correct: int | None
    units: np.ndarray
    rewards: Rewards | None = None  # of preferences
    chosen_nll: tuple[float, float, np.ndarray] | None = None  # of chosen answers: loss, tokens, units
    rollouts: RolloutStats | None = None  # of generated answers
    unreported: int = 0  # their rewards that failed on a rank that prints nothing
    judged: int | None = None  # predictions of which `correct` are; None: one for each token


def evaluate_batch(programs: EvalPrograms, batch: Batch) -> BatchLoss:
    """Run a batch through the evaluation program and return its losses."""
    (loss, correct), tokens = programs.eval_loss(batch), int(np.count_nonzero(batch.weights))
    if batch.answers and isinstance(rewards := programs.rewards(batch), Rewards):
        present = np.flatnonzero(batch.answers.sides)
        parts, chosen_nll = [part[present] for part in programs.loss_parts()], None
        if len(parts) > 1:
            counts = np.bincount(batch.answers.sequences[batch.answers.chosen], minlength=len(present))
            chosen_nll = (
                programs.loss_terms()[1],
                float(batch.answers.chosen_tokens),
                stack_units(parts[1], counts),
            )
        return BatchLoss(
            loss,
            batch.answers.count,
            tokens,
            None,
            stack_units(parts[0], np.ones(len(present))),
            rewards,
            chosen_nll,
        )
    weight = float(batch.weights.sum(dtype=np.float64))
    return BatchLoss(loss, weight, tokens, correct, sample_units(batch, programs.token_losses(batch)))


def stack_units(losses: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Stack losses and weights of units to (units, 2) in float64."""
    return np.stack([losses.astype(np.float64), weights.astype(np.float64)], axis=1)


def sample_units(batch: Batch, losses: np.ndarray) -> np.ndarray:
    """Sum the losses of each sample's tokens; `losses` has one entry per token with a weight."""
    positions = np.flatnonzero(batch.weights)
    rows, length = batch.starts.shape
    sample_starts = (np.arange(rows)[:, None] * length + batch.starts).reshape(-1)[positions]
    _, samples = np.unique(sample_starts, return_inverse=True)
    return stack_units(
        *(
            np.bincount(samples, values.astype(np.float64))
            for values in (losses, batch.weights.reshape(-1)[positions])
        )
    )


def gather_batch_losses(
    comm: Comm, own_losses: Iterator[T], get_signal: Callable[[], int] = int
) -> Iterator[T]:
    """Yield the losses of all ranks' batches in order; each rank evaluates every n-th batch.

    If a signal, a changed input or a failed reward reaches one rank, the error is raised on every rank.
    """
    while True:
        loss, changed, failed = None, "", ""
        try:
            loss = next(own_losses, None)
        except InputChanged as error:
            changed = str(error)
        except RewardError as error:
            failed = str(error)
        gathered = comm.all_gather((loss, get_signal(), changed, failed))
        if message := next((changed for *_, changed, _ in gathered if changed), ""):
            raise InputChanged(message)
        if problem := next((failed for *_, failed in gathered if failed), ""):
            raise shared_reward_error(problem)
        if signal := next((signal for _, signal, *_ in gathered if signal), 0):
            raise TrainingInterrupted(signal)
        yield from (batch_loss for batch_loss, *_ in gathered if batch_loss)
        if not all(batch_loss for batch_loss, *_ in gathered):
            return


@dataclass
class LossMeter:
    """Accumulates batch losses into a score."""

    losses: list[float] = field(default_factory=list)  # sums, by batch
    weights: list[float] = field(default_factory=list)
    tokens: int = 0
    correct: int | None = 0
    judged: int = 0
    compares_texts: bool = False
    rewards: Rewards | None = None
    rollouts: RolloutStats | None = None
    unreported: int = 0
    units: list[np.ndarray] = field(default_factory=list)
    chosen_nll: list[tuple[float, float, np.ndarray]] = field(default_factory=list)

    def add(self, batch: BatchLoss) -> None:
        """Add the losses of a batch."""
        self.losses.append(batch.loss)
        self.weights.append(batch.weight)
        self.units.append(batch.units)
        self.tokens += batch.tokens
        self.judged += batch.tokens if batch.judged is None else batch.judged
        self.compares_texts = batch.judged is not None
        self.unreported += batch.unreported
        if batch.rollouts:
            self.rollouts = self.rollouts.plus(batch.rollouts) if self.rollouts else batch.rollouts
        if batch.rewards:
            self.rewards = self.rewards.plus(batch.rewards) if self.rewards else batch.rewards
            self.chosen_nll += [batch.chosen_nll] if batch.chosen_nll else []
            return
        self.correct = None if batch.correct is None or self.correct is None else self.correct + batch.correct

    @property
    def score(self) -> Score:
        """The mean loss and accuracy so far, with their standard errors."""
        if self.rewards:
            return self._preference_score(self.rewards)
        total, tokens = math.fsum(self.weights), self.tokens
        loss = math.fsum(self.losses) / total
        accuracy = accuracy_error = None
        error = standard_error(unit_deviations(loss, total, self.units))
        if self.correct is not None and math.isfinite(loss):
            accuracy = self.correct / self.judged
            accuracy_error = share_error(accuracy, self.judged)
        return Score(
            loss=loss,
            loss_error=error,
            accuracy=accuracy,
            accuracy_error=accuracy_error,
            tokens=tokens,
            answers=self.rollouts.answers if self.rollouts else self.judged if self.compares_texts else None,
            reward=self.rollouts.metrics["reward"] if self.rollouts else None,
        )

    def _preference_score(self, rewards: Rewards) -> Score:
        """Return the score of preference data: the sum of the terms' means, with a joint standard error."""
        kinds = [(self.losses, self.weights, self.units)]
        if self.chosen_nll:
            sums, counts, units = zip(*self.chosen_nll, strict=True)
            kinds.append(([*sums], [*counts], [*units]))
        loss, deviations = 0.0, np.zeros(1)
        for sums, counts, units in kinds:
            total = math.fsum(counts)
            mean = math.fsum(sums) / total
            loss, deviations = loss + mean, deviations + unit_deviations(mean, total, units)
        metrics, error = rewards.metrics, standard_error(deviations)
        accuracy, count = metrics["accuracy"], rewards.count_judged
        accuracy_error = None if accuracy is None else share_error(accuracy, count)
        return Score(
            loss=loss,
            loss_error=error,
            accuracy_error=accuracy_error,
            tokens=self.tokens,
            answers=count,
            **metrics,
        )


def unit_deviations(mean: float, total: float, units: Sequence[np.ndarray]) -> np.ndarray:
    """Return each unit's contribution to the deviation of a weighted mean; `total` is the sum of the weights."""
    losses, weights = np.concatenate(units).T
    return (losses - mean * weights) / total


def standard_error(deviations: np.ndarray) -> float | None:
    """Return the standard error of a mean from its units' deviations; None with fewer than two units."""
    count = len(deviations)
    if count < 2 or not np.isfinite(deviations).all():
        return None
    return math.sqrt(math.fsum(deviations**2) * count / (count - 1))


def share_error(share: float, count: int) -> float | None:
    """Return the standard error of a share of units; None with fewer than two units."""
    return math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else None
