"""Loss and accuracy over many batches, with their uncertainties."""

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Score:
    """Loss and accuracy of samples.

    An uncertainty is one standard error: of the loss by the differences between batches, of the accuracy by
    the binomial distribution. It is NaN if there are fewer than two batches or predictions.
    """

    samples: int
    loss: float
    loss_uncertainty: float
    accuracy: float | None = None  # None: the loss knows no classes
    accuracy_uncertainty: float | None = None

    def __str__(self) -> str:
        text = f"loss {format_measure(self.loss, self.loss_uncertainty)}"
        if self.accuracy is None or self.accuracy_uncertainty is None:
            return text
        return f"{text}, accuracy {format_measure(100 * self.accuracy, 100 * self.accuracy_uncertainty)} %"


def format_measure(value: float, uncertainty: float) -> str:
    """Return a value with its uncertainty."""
    return f"{value:.4g}" if math.isnan(uncertainty) else f"{value:.4g} ± {uncertainty:.1g}"


@dataclass
class ScoreMeter:
    """Adds up batches. Means count batches by their samples."""

    is_sum: bool = False  # losses are sums over a batch
    losses: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    correct: int = 0
    predictions: int = 0

    def add(self, loss: float, samples: int, correct: int = 0, predictions: int = 0) -> None:
        """Add a batch."""
        self.losses.append(loss)
        self.samples.append(samples)
        self.correct += correct
        self.predictions += predictions

    def score(self) -> Score:
        """Return the score of all batches so far; there must be one."""
        count = len(self.losses)
        weights = [1 / count if self.is_sum else samples / sum(self.samples) for samples in self.samples]
        mean = math.fsum(map(math.prod, zip(weights, self.losses, strict=True)))
        variance = math.fsum(
            weight * (loss - mean) ** 2 for weight, loss in zip(weights, self.losses, strict=True)
        )
        error = math.sqrt(variance / (count - 1)) if count > 1 else math.nan
        factor = count if self.is_sum else 1
        return Score(sum(self.samples), factor * mean, factor * error, *self._accuracy())

    def _accuracy(self) -> tuple[float | None, float | None]:
        if not self.predictions:
            return None, None
        share = self.correct / self.predictions
        spread = share * (1 - share)
        return share, math.sqrt(spread / (self.predictions - 1)) if self.predictions > 1 else math.nan
