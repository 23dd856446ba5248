"""The learning rate as a pure function of the step. Steps count from 1.

    warm-up              rises linearly from the minimum; step W of W reaches the peak
    decay                starts after the warm-up and reaches the minimum `decay_steps` later
    after that           the minimum, or with `restart_growth` the cosine again, each period longer by that factor

`wsd` (warm-up, stable, decay: Hu et al. 2024) stays at the peak until the last `decay_steps`, in which it
falls as 1 - sqrt (Hägele et al. 2024): a run that is resumed with more steps from before its decay equals one
that was planned as long.

The last step of a period has the minimum; the step after it is the first of the next period.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from llamatrain.config.messages import quote
from llamatrain.errors import UsageError

MAX_PERIODS = 100_000  # beyond this many, periods are not iterated
DECAYS = {
    "constant": lambda part: 1.0,
    "linear": lambda part: 1.0 - part,
    "cosine": lambda part: 0.5 * (1.0 + math.cos(math.pi * part)),
    "wsd": lambda part: 1.0 - math.sqrt(part),
}


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule."""

    kind: str = "cosine"
    peak: float = 1e-3
    minimum: float = 0.0  # also of the warm-up
    warmup: int = 0
    decay_steps: int = 1  # for the cosine, the first period
    end: int = 0  # the last step, where the decay of `wsd` ends
    restart_growth: float = 0.0  # each period is longer by this factor; 0: no restarts

    def __post_init__(self) -> None:
        if self.kind not in DECAYS:
            raise UsageError(
                f"schedule must be one of {', '.join(DECAYS)} (got {self.kind!r})", code="unknown-schedule"
            )
        if not 0 <= self.minimum <= self.peak < math.inf:
            raise UsageError(
                f"the minimum rate must be between 0 and the rate {self.peak:g} (got {self.minimum:g})",
                code="invalid-rate",
            )
        if self.warmup < 0:
            raise UsageError(f"warm-up must be 0 steps or more (got {self.warmup})", code="invalid-warmup")
        if self.kind != "constant" and self.decay_steps < 1:
            raise UsageError(f"decay must be 1 step or more (got {self.decay_steps})", code="invalid-decay")
        if self.restart_growth and not (self.kind == "cosine" and 1 <= self.restart_growth < math.inf):
            raise UsageError(
                f"restarts need the cosine schedule and a growth of 1 or more (got {self.kind} and "
                f"{self.restart_growth:g})",
                code="invalid-restart",
            )

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        if step < self.warmup:
            return self._interpolate(step / self.warmup)
        done = step - max(self.warmup, 1)  # without a warm-up the first step has the peak
        if self.kind == "wsd":
            return self._interpolate(DECAYS[self.kind](self._fall_share(step)))
        return self._interpolate(DECAYS[self.kind](self._period_share(done)))

    def _period_share(self, done: int) -> float:
        """Return the share of its period that a step has completed, 0 to 1."""
        rest, period = float(done), float(self.decay_steps)
        if not self.restart_growth:
            return min(rest / period, 1.0)
        if self.restart_growth == 1:  # a shortcut with the same result: periods are whole steps
            rest = math.fmod(rest, period) or min(rest, period)
        elif (
            periods := math.log1p(rest * (self.restart_growth - 1) / period) // math.log(self.restart_growth)
        ) > MAX_PERIODS:
            longer = self.restart_growth**periods
            rest, period = max(0.0, rest - period * (longer - 1) / (self.restart_growth - 1)), period * longer
        while rest > period:
            rest, period = rest - period, period * self.restart_growth
        return rest / period

    def _fall_share(self, step: int) -> float:
        """Return the share of the only decay, which does not begin before the warm-up ends."""
        steps = max(1, min(self.decay_steps, self.end - max(self.warmup, 1)))
        return min(max(0, step - self.end + steps) / steps, 1.0)

    def _interpolate(self, share: float) -> float:
        return self.minimum + share * (self.peak - self.minimum)


@dataclass(frozen=True)
class FunctionSchedule:
    """A learning rate that a function of the step gives."""

    function: Callable[[int], object]

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, which must be finite and not negative."""
        rate = self.function(step)
        if not isinstance(rate, int | float | np.number) or not 0 <= rate < math.inf:
            raise UsageError(
                f"the learning rate must be a finite number of at least 0 (got {quote(rate)} at step {step})",
                code="invalid-rate",
            )
        return float(rate)
