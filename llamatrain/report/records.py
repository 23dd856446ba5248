"""The records that a run reports."""

from dataclasses import dataclass

PREFERENCE_FIELDS = ("margin", "accuracy", "reward_chosen", "reward_rejected")
ANSWER_FIELDS = ("reward", "reward_std", "answer_tokens", "truncated", "kl", "clipped")


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
    seconds_waited: float | None = None  # of these, waiting for data
    evaluations: int | None = None  # of L-BFGS so far, which takes several per step
    epoch: int | None = None  # the present one, from 1
    sample: int | None = None  # the last one in the order of the epoch, from 1
    samples: int | None = None  # per epoch
    total_seconds: float | None = None  # of all steps so far
    margin: float | None = None  # mean reward of chosen minus rejected answers
    accuracy: float | None = None  # share of answers ranked as in the data
    reward_chosen: float | None = None
    reward_rejected: float | None = None
    reward: float | None = None  # mean of generated answers
    reward_std: float | None = None
    answer_tokens: float | None = None  # mean length
    truncated: float | None = None  # share of answers without an end
    kl: float | None = None  # mean divergence from the base at a token
    clipped: float | None = None  # share of tokens whose ratio of probabilities was out of bounds
    ranks: int | None = None  # that shared the step
    seconds_exposed: float | None = None  # waiting for other ranks
    slowest: int | None = None  # the last rank to finish
    device_peak_bytes: int | None = None  # the most of the device's own memory so far


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The metrics of a validation: means over tokens, each with its standard error if known."""

    loss: float
    loss_error: float | None
    accuracy: float | None  # share of tokens predicted as the most likely
    accuracy_error: float | None
    tokens: int
    margin: float | None = None  # with preferences, as in a step; then accuracy is that of answers
    reward_chosen: float | None = None
    reward_rejected: float | None = None
    answers: int | None = None  # or pairs, or queries
    reward: float | None = None  # mean of generated answers; the loss is minus this
