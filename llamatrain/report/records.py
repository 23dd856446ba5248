"""The records that a run reports."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """The metrics of a step."""

    step: int
    loss: float
    lr: float
    grad_norm: float | None
    tokens: int  # of the whole run so far
    seconds: float  # of this step
    tokens_per_second: float
    seconds_waited: float | None = None  # of these, for its rows
    evaluations: int | None = None  # of L-BFGS so far, where a step takes several
    epoch: int | None = None  # that is under way, from 1 on
    sample: int | None = None  # the last one taken, in the epoch's order from 1 on
    samples: int | None = None  # of the data
    total_seconds: float | None = None  # of all steps so far
    margin: float | None = (
        None  # by which the rewards of chosen answers are above those of rejected ones, on the average
    )
    accuracy: float | None = None  # the part of the answers that were judged as the data has it
    reward_chosen: float | None = None
    reward_rejected: float | None = None
    ranks: int | None = None  # that it was divided among
    seconds_exposed: float | None = None  # in which others were waited for
    slowest: int | None = None  # the rank that came last


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The metrics of a validation: means over tokens, each with its standard error if known."""

    loss: float
    loss_error: float | None
    accuracy: float | None  # the part of the tokens that were held likeliest
    accuracy_error: float | None
    tokens: int
    margin: float | None = None  # of answers that are compared, as of a step; the accuracy is theirs then
    reward_chosen: float | None = None
    reward_rejected: float | None = None
    answers: int | None = None  # or pairs
