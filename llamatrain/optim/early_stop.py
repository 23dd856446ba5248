"""Early stopping rules, and the reason in words. Losses are those of single batches, so the rules are noisy.

    window, min_change    the loss differs from that `window` evaluations ago by less than `min_change` of itself
    max_no_improvement    this many evaluations in a row did not improve on the best loss
    min_relative_change   the loss differs from the previous one by less than this share of itself

A limit of 0 disables its rule.
"""

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StopRules:
    """The limits of the rules."""

    window: int = 0
    min_change: float = 1e-5
    max_no_improvement: int = 0
    min_relative_change: float = 0.0


@dataclass
class StopState:
    """The state of the rules, which a checkpoint saves."""

    best_loss: float = math.inf
    previous_loss: float = math.nan
    no_improvement_count: int = 0
    past_loss_values: list[float] = field(default_factory=list)  # the last `window`, oldest first

    def observe(self, rules: StopRules, loss: float) -> str | None:
        """Add the loss of an evaluation; return the reason to stop, or None."""
        improved = loss < self.best_loss
        self.no_improvement_count = 0 if improved else self.no_improvement_count + 1
        self.best_loss = min(self.best_loss, loss)
        reasons = [
            self._without_improvement(rules),
            self._against_past(rules, loss),
            self._against_previous(rules, loss),
        ]
        self.previous_loss = loss
        self.past_loss_values = [*self.past_loss_values, loss][-rules.window :] if rules.window > 0 else []
        return next(filter(None, reasons), None)

    def _without_improvement(self, rules: StopRules) -> str | None:
        if not 0 < rules.max_no_improvement <= self.no_improvement_count:
            return None
        return f"no loss below {self.best_loss:.6g} in the last {self.no_improvement_count} evaluations"

    def _against_past(self, rules: StopRules, loss: float) -> str | None:
        if rules.window <= 0 or len(self.past_loss_values) < rules.window:
            return None
        past_loss = self.past_loss_values[-rules.window]
        if not _is_close(past_loss, loss, rules.min_change):
            return None
        return (
            f"the loss went from {past_loss:.6g} to {loss:.6g} in {rules.window} evaluations, less than "
            f"{rules.min_change:g} of itself"
        )

    def _against_previous(self, rules: StopRules, loss: float) -> str | None:
        if not _is_close(self.previous_loss, loss, rules.min_relative_change):
            return None
        return f"the loss went from {self.previous_loss:.6g} to {loss:.6g}, less than {rules.min_relative_change:g} of itself"


def _is_close(previous: float, loss: float, limit: float) -> bool:
    """Compare two losses. Nothing is close to NaN, the previous loss of the first evaluation."""
    return limit > 0 and abs(previous - loss) <= limit * abs(loss)
