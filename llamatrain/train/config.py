"""The configuration of the training loop, and the reason why it stopped."""

from dataclasses import dataclass

from llamatrain.optim.early_stop import StopRules
from llamatrain.optim.schedule import FunctionSchedule, Schedule


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """The length of a run, its learning rate, and how often it validates, samples and saves."""

    iters: int
    microbatches: int  # per step
    seed: int
    schedule: Schedule | FunctionSchedule
    stop_rules: StopRules
    eval_every: int  # 0: never
    sample_every: int
    save_every: int
    patience: int = 0  # validations without a lower loss before the run ends; 0: no limit
    max_time: float | None = None  # seconds of this process; None: no limit
    iters_per_rows: int = 0  # L-BFGS iterations on the same rows; 0: all


DONE = "done"  # the run completed all its steps
PAUSED = "paused"  # the caller resumes the run at once


@dataclass(frozen=True)
class StopReason:
    """Why a run stopped, and the signal that stopped it (0: none)."""

    reason: str
    signal: int = 0
    finished: bool = True
