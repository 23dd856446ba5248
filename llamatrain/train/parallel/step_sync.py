"""The data that ranks exchange in a step. With one rank it is only its own."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from llamatrain.data.batches import Batch
from llamatrain.preference.batch import PreferenceTotals, Rewards


class MicrobatchInfo(NamedTuple):
    """The weight and size of a micro-batch, as all ranks know them."""

    totals: PreferenceTotals
    tokens: int
    rows: int

    @classmethod
    def of(cls, batch: Batch) -> "MicrobatchInfo":
        """Return the info of a batch."""
        compared, weight = batch.compared, float(batch.weights.sum(dtype="float64"))
        totals = PreferenceTotals(
            weight, compared.count if compared else 0, compared.words if compared else 0
        )
        return cls(totals, batch.size, len(batch.tokens) - batch.empty)


def totals_of(weighed: Iterable[MicrobatchInfo]) -> PreferenceTotals:
    """Sum the weights of all micro-batches of a step."""
    weight = answers = words = 0.0
    for each in weighed:
        weight += each.totals.weight
        answers += each.totals.answers
        words += each.totals.words
    return PreferenceTotals(weight, answers, words)


@dataclass
class RankStep:
    """The result of a rank's part of a step, or why it has none."""

    losses: list[float] = field(default_factory=list)  # of its micro-batches
    rewards: list[Rewards] = field(default_factory=list)
    seconds: float = 0.0
    asked: int = 0  # the signal that came to it
    changed: str = ""  # what it reads is not what it was
    late: bool = False  # its time is up


class MergedStep(NamedTuple):
    """The result of a step over all ranks."""

    losses: list[float]
    rewards: Rewards | None
    asked: int
    changed: str
    late: bool  # as the first has it
    slowest: int  # the rank


def whole_of(parts: Sequence[RankStep]) -> MergedStep:
    """Merge the results of all ranks, in the order of ranks."""
    rewards: Rewards | None = None
    for each in (each for part in parts for each in part.rewards):
        rewards = rewards.plus(each) if rewards else each
    return MergedStep(
        losses=[loss for part in parts for loss in part.losses],
        rewards=rewards,
        asked=next((part.asked for part in parts if part.asked), 0),
        changed=next((part.changed for part in parts if part.changed), ""),
        late=parts[0].late,
        slowest=max(range(len(parts)), key=lambda rank: parts[rank].seconds),
    )
