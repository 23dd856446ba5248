"""The data that ranks exchange in a step. With one rank it is only its own."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

from llamatrain.data.batches import Batch, StepTotals
from llamatrain.grpo.metrics import RolloutStats
from llamatrain.preference.batch import Rewards


class MicrobatchInfo(NamedTuple):
    """The weight and size of a micro-batch, as all ranks know them."""

    totals: StepTotals
    tokens: int
    rows: int

    @classmethod
    def from_batch(cls, batch: Batch) -> "MicrobatchInfo":
        """Return the info of a batch."""
        answers = batch.answers
        weight = float(batch.weights.sum(dtype="float64"))
        totals = StepTotals(weight, answers.count if answers else 0, answers.chosen_tokens if answers else 0)
        return cls(totals, batch.size, len(batch.tokens) - batch.empty)


def sum_totals(microbatches: Iterable[MicrobatchInfo]) -> StepTotals:
    """Sum the weights of all micro-batches of a step."""
    weight = answers = words = 0.0
    for microbatch in microbatches:
        weight += microbatch.totals.weight
        answers += microbatch.totals.answers
        words += microbatch.totals.chosen_tokens
    return StepTotals(weight, answers, words)


def add_rewards(parts: Sequence[Rewards | RolloutStats]) -> Rewards | RolloutStats:
    """Sum the rewards of batches, which are of one kind."""
    return reduce(lambda total, part: total.plus(part), parts)  # type: ignore[arg-type]


@dataclass
class RankStep:
    """The result of a rank's part of a step, or why it has none."""

    losses: list[float] = field(default_factory=list)  # by micro-batch
    rewards: list[Rewards | RolloutStats] = field(default_factory=list)
    seconds: float = 0.0
    signal: int = 0  # signal received, or 0
    input_error: str = ""  # message if an input changed
    time_is_up: bool = False


class MergedStep(NamedTuple):
    """The result of a step over all ranks."""

    losses: list[float]
    rewards: Rewards | RolloutStats | None
    signal: int
    input_error: str
    time_is_up: bool  # on rank 0
    slowest_rank: int


def merge_steps(parts: Sequence[RankStep]) -> MergedStep:
    """Merge the results of all ranks, in the order of ranks."""
    rewards = [batch_rewards for part in parts for batch_rewards in part.rewards]
    return MergedStep(
        losses=[loss for part in parts for loss in part.losses],
        rewards=add_rewards(rewards) if rewards else None,
        signal=next((part.signal for part in parts if part.signal), 0),
        input_error=next((part.input_error for part in parts if part.input_error), ""),
        time_is_up=parts[0].time_is_up,
        slowest_rank=max(range(len(parts)), key=lambda rank: parts[rank].seconds),
    )
