"""The configuration of the training loop, and the reason why it stopped."""

from dataclasses import dataclass

from llamatrain.optim.early_stop import StopRules
from llamatrain.optim.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """The length of a run, its learning rate, and how often it validates, samples and saves."""

    iters: int
    grad_acc: int  # micro-batches of a step
    seed: int
    schedule: Schedule
    stop_rules: StopRules
    eval_every: int  # 0: never
    sample_every: int
    save_every: int
    patience: int = 0  # validations in a row without a lower loss, until it ends; 0: any number
    max_time: float | None = None  # seconds of this process; None: without limit
    iters_per_rows: int = 0  # iterations of a descent on the same rows; 0: all


DONE = "done"  # of a run that ended as it was meant to


@dataclass(frozen=True)
class StopReason:
    """Why a run stopped, and the signal that stopped it (0: none)."""

    reason: str
    signal: int = 0
    finished: bool = True
