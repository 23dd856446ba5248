"""Models how long a step takes on several ranks.

A step waits for the rank that has most to compute, and for the slowest of those: if the seconds of n ranks
spread about their mean by a share s, the slowest is expected to take 1 + s * e(n) times the mean, with Blom's
(1958) e(n) = Φ⁻¹((n - 3/8) / (n + 1/4)). Gradients are sent in buckets during the backward pass of the last
micro-batch, which takes two thirds of it. What does not fit behind that is waited for, and so is the last
bucket, which is final only at its end. Weights are gathered when all ranks have updated theirs.
"""

from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import NormalDist

from llamatrain.train.parallel.partition import BUCKET, cover_with_nodes, rank_range

BACKWARD = 2 / 3  # the share of a micro-batch in which gradients become final
GATHERS = 3  # small gathers in a step: sizes, losses, norms
FLOAT = 4  # bytes


@dataclass(frozen=True, kw_only=True)
class ShardedStep:
    """A step shared by ranks: its micro-batches lie in groups, and the groups are divided among the ranks."""

    ranks: int
    micro: int  # micro-batches
    groups: int
    trained: int  # floats
    grad_bytes: int = FLOAT  # bytes of a gradient element on the network

    @property
    def rank_groups(self) -> list[range]:
        """The groups of each rank."""
        return [rank_range(self.groups, self.ranks, rank) for rank in range(self.ranks)]

    @cached_property
    def max_micro(self) -> int:
        """Micro-batches of the rank that has most."""
        group_starts = [rank_range(self.micro, self.groups, group).start for group in range(self.groups)] + [
            self.micro
        ]
        return max(group_starts[groups.stop] - group_starts[groups.start] for groups in self.rank_groups)

    @cached_property
    def max_sums(self) -> int:
        """Partial sums that are sent by the rank that sends most."""
        return max(len(cover_with_nodes(groups)) for groups in self.rank_groups)

    @property
    def buckets(self) -> int:
        """Buckets that the gradients are sent in."""
        return -(-self.trained // BUCKET)

    @property
    def sent_gradients(self) -> float:
        """Bytes of gradients that a rank sends; it receives as many."""
        return self._others * self.trained * self.grad_bytes * self.max_sums

    @property
    def sent_weights(self) -> float:
        """Bytes of updated weights that a rank sends; it receives as many."""
        return self._others * self.trained * FLOAT

    @property
    def _others(self) -> float:
        return (self.ranks - 1) / self.ranks


@dataclass(frozen=True, kw_only=True)
class LinkModel:
    """The speed of a rank and its network, in seconds."""

    micro: float  # a micro-batch
    update: float  # the optimizer's step over all that is trained
    byte: float  # seconds per byte and direction of the link, which the ranks of a host share
    message: float
    spread: float  # spread of step times between ranks, as a share of the mean
    adding: float = 0.0  # a micro-batch's gradients to those before it


@dataclass(frozen=True, kw_only=True)
class StepTimeBreakdown:
    """The seconds of a step, by what they are spent on."""

    compute: float
    imbalance: float
    exchange: float  # communication that is not hidden by computation
    update: float
    weight_gather: float
    small_gathers: float

    @property
    def total(self) -> float:
        """The seconds of the step."""
        return sum(asdict(self).values())

    @property
    def exposed(self) -> float:
        """Seconds of communication that computing does not hide."""
        return self.exchange + self.weight_gather + self.small_gathers


def step_seconds(step: ShardedStep, link: LinkModel, ranks_per_host: int = 1) -> StepTimeBreakdown:
    """Return the time of a step, with this many ranks on each host."""
    peers, barrier = step.ranks - 1, link.message * (step.ranks - 1).bit_length()
    bucket = step.sent_gradients / step.buckets * ranks_per_host * link.byte + peers * link.message + barrier
    hidden = BACKWARD * link.micro
    compute = step.max_micro * link.micro + (step.max_micro - 1) * link.adding
    return StepTimeBreakdown(
        compute=compute,
        imbalance=compute * link.spread * expected_slowest(step.ranks),
        exchange=bucket + max(0.0, (step.buckets - 1) * bucket - hidden),
        update=link.update / step.ranks,
        weight_gather=step.sent_weights * ranks_per_host * link.byte
        + step.buckets * peers * link.message
        + barrier,
        small_gathers=GATHERS * barrier,
    )


def expected_slowest(ranks: int) -> float:
    """Return the expected maximum of this many standard normal variables."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
