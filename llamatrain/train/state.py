"""The state of a run between two micro-batches: with the vectors of its programs, all that resuming needs."""

import math
from dataclasses import dataclass, field

from llamatrain.data.batches import CursorState
from llamatrain.grpo.metrics import RolloutStats
from llamatrain.grpo.rollouts import Rollouts
from llamatrain.optim.early_stop import StopState
from llamatrain.preference.batch import Rewards


@dataclass
class Counters:
    """Totals of the whole run so far."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    epoch: int = 0
    seconds: float = 0.0


@dataclass
class PartialStep:
    """A step that was interrupted.

    It holds the losses of the micro-batches whose gradients are accumulated, and their time.
    """

    losses: list[float]
    seconds: float = 0.0
    rewards: Rewards | RolloutStats | None = None  # of preferences or generated answers


@dataclass
class BestValidation:
    """The validation with the lowest loss so far.

    Patience counts only the scheduled validations. A run that stops by time or number of steps validates once
    more, which must not change when the resumed run ends.
    """

    loss: float = math.inf
    step: int | None = None
    stale: int = 0  # scheduled validations since the lowest loss
    scheduled_loss: float = math.inf  # that lowest loss

    def observe(self, loss: float, step: int, scheduled: bool = True) -> bool:
        """Count a validation and return True if it is the best so far. NaN never is."""
        if scheduled:
            self.stale = 0 if loss < self.scheduled_loss else self.stale + 1
            self.scheduled_loss = min(self.scheduled_loss, loss)
        if better := loss < self.loss:
            self.loss, self.step = loss, step
        return better

    def stop_reason(self, patience: int) -> str | None:
        """Return why patience has run out, or None."""
        if not 0 < patience <= self.stale:
            return None
        bound = f"below {self.loss:.6g} (step {self.step})" if self.step is not None else "that is a number"
        return f"no validation loss {bound} in the last {self.stale} validations"


@dataclass
class RunState:
    """The state that the loop advances and a checkpoint saves."""

    counters: Counters = field(default_factory=Counters)
    data: CursorState | None = None  # before a step under way, after a completed one; None: at the start
    stop: StopState = field(default_factory=StopState)
    best: BestValidation = field(default_factory=BestValidation)
    partial: PartialStep | None = None
    validation_due: bool = False  # the last step has not been validated yet
    rollouts: Rollouts | None = None  # answers that several steps train
    stop_reason: str | None = None  # why a stop rule ended the run
