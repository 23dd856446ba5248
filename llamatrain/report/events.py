"""What a run tells of itself, whoever listens."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    step: int
    loss: float
    lr: float
    grad_norm: float | None
    tokens: int  # of the whole run so far
    seconds: float  # of this step
    tokens_per_second: float
    seconds_waited: float | None = None  # of these, for its rows
    evaluations: int | None = None  # of L-BFGS so far, where a step takes several
