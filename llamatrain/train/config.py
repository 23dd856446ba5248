"""How far a run goes, and how it ended."""

from dataclasses import dataclass

from llamatrain.optim.early_stop import StopRules
from llamatrain.optim.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How far a run goes, at which rate, and what is done on its way."""

    iters: int
    grad_acc: int  # micro-batches of a step
    seed: int
    schedule: Schedule
    rules: StopRules
    eval_every: int  # 0: never
    sample_every: int
    save_every: int
    patience: int = 0  # validations in a row without a lower loss, until it ends; 0: any number
    max_time: float | None = None  # seconds of this process; None: without limit
    fresh: int = 0  # iterations of a descent on the same rows; 0: all


DONE = "done"  # of a run that ended as it was meant to


@dataclass(frozen=True)
class StopReason:
    """Why a run ended, and by which signal, if by one."""

    reason: str
    signal: int = 0
    finished: bool = True
