"""The metrics of generated answers."""

import math
from typing import NamedTuple, Self, TypedDict

import numpy as np

from llamatrain.data.batches import Batch, RolloutBatch
from llamatrain.grpo.settings import Grpo


class RolloutMetrics(TypedDict):
    """The metrics of a step or a validation; None: not measured."""

    reward: float | None
    reward_std: float | None
    answer_tokens: float | None
    truncated: float | None
    kl: float | None
    clipped: float | None


class RolloutStats(NamedTuple):
    """Sums over generated answers and their tokens; they add up over batches."""

    reward: float = 0.0
    squares: float = 0.0  # of rewards
    answers: int = 0
    answer_tokens: int = 0
    truncated: int = 0  # answers without an end
    tokens: int = 0  # that are trained
    divergence: float | None = None  # from the reference
    clipped: int | None = None  # tokens whose ratio is outside of the bounds

    @classmethod
    def from_answers(cls, rollouts: RolloutBatch) -> Self:
        """Return the sums over the answers of a batch."""
        present = np.isfinite(rollouts.rewards)
        rewards = rollouts.rewards[present]
        return cls(
            math.fsum(rewards),
            math.fsum(rewards**2),
            len(rewards),
            int(rollouts.sizes[present].sum()),
            int(rollouts.truncated[present].sum()),
        )

    @classmethod
    def from_batch(cls, batch: Batch, log_probs: list[np.ndarray], settings: Grpo) -> Self:
        """Return the sums over a batch; `log_probs` of the trained tokens are those of the model, and the reference's."""
        assert batch.rollouts
        trained = batch.weights > 0
        own, *reference = (values.astype(np.float64) for values in log_probs)
        stats = cls.from_answers(batch.rollouts)._replace(tokens=int(trained.sum()))
        with np.errstate(over="ignore"):
            if reference:
                log_ratios = reference[0] - own
                stats = stats._replace(divergence=float(np.sum(np.exp(log_ratios) - log_ratios - 1)))
            if settings.keeps_log_probs:
                ratios = np.exp(own - batch.rollouts.old_log_probs[trained])
                advantages = batch.rollouts.advantages[trained]
                below = (ratios < 1 - settings.epsilon) & (advantages < 0)
                above = (ratios > 1 + settings.epsilon_high) & (advantages > 0)
                stats = stats._replace(clipped=int((below | above).sum()))
        return stats

    def plus(self, other: "RolloutStats") -> "RolloutStats":
        """Return the sum with another batch's answers."""
        pairs = zip(self, other, strict=True)
        return RolloutStats._make(None if own is None or more is None else own + more for own, more in pairs)

    @property
    def metrics(self) -> RolloutMetrics:
        """The means, and the standard deviation of the rewards."""
        answers, tokens = max(1, self.answers), max(1, self.tokens)
        mean, deviation = self.reward / answers, None
        if self.answers > 1:
            deviation = math.sqrt(max(0.0, self.squares - self.answers * mean**2) / (self.answers - 1))
        return RolloutMetrics(
            reward=mean,
            reward_std=deviation,
            answer_tokens=self.answer_tokens / answers,
            truncated=self.truncated / answers,
            kl=None if self.divergence is None else self.divergence / tokens,
            clipped=None if self.clipped is None else self.clipped / tokens,
        )
