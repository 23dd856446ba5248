"""How long a step takes on several ranks: pure functions of what it is made of, and of how fast a rank and its network are.

A step waits for the rank that has most to compute, and for the slowest of those: of n whose seconds spread about a mean by a
share s, that one is expected to take 1 + s · e(n) times the mean, with Blom's (1958) e(n) = Φ⁻¹((n - 3/8) / (n + 1/4)). Gradients
go out in buckets while the last micro-batch goes backward, which is two thirds of it; what does not fit behind that, and the last
bucket, which is final only at its end, are waited for. Weights are gathered when all have taken the optimizer's step.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import combinations
from statistics import NormalDist

import numpy as np

from llamatrain.train.parallel.partition import BUCKET, cover_with_nodes, rank_range

BACKWARD = 2 / 3  # of a micro-batch: the part in which gradients become final
GATHERS = 3  # small ones in a step: what it is made of, losses, and parts of the norm
FLOAT = 4  # bytes


@dataclass(frozen=True, kw_only=True)
class ShardedStep:
    """A step that ranks share: its micro-batches lie in groups, and these are divided among ranks."""

    ranks: int
    micro: int  # micro-batches
    groups: int
    trained: int  # floats
    grad_bytes: int = FLOAT  # bytes of a gradient on it

    @property
    def rank_groups(self) -> list[range]:
        """Of each rank."""
        return [rank_range(self.groups, self.ranks, rank) for rank in range(self.ranks)]

    @cached_property
    def max_micro(self) -> int:
        """Micro-batches of the rank that has most of them."""
        group_starts = [rank_range(self.micro, self.groups, group).start for group in range(self.groups)] + [
            self.micro
        ]
        return max(group_starts[groups.stop] - group_starts[groups.start] for groups in self.rank_groups)

    @cached_property
    def max_sums(self) -> int:
        """Of branches of the tree, that the rank with most of them sends."""
        return max(len(cover_with_nodes(groups)) for groups in self.rank_groups)

    @property
    def buckets(self) -> int:
        return -(-self.trained // BUCKET)

    @property
    def sent_gradients(self) -> float:
        """Bytes that a rank sends; it receives as many."""
        return self._others * self.trained * self.grad_bytes * self.max_sums

    @property
    def sent_weights(self) -> float:
        """Bytes that it sends of what it has changed, and likewise receives."""
        return self._others * self.trained * FLOAT

    @property
    def _others(self) -> float:
        return (self.ranks - 1) / self.ranks


@dataclass(frozen=True, kw_only=True)
class LinkModel:
    """Of a rank and its network, in seconds."""

    micro: float  # a micro-batch
    update: float  # the optimizer's step over all that is trained
    byte: float  # of the link, each way; ranks on one host share it
    message: float
    spread: float  # of a rank's seconds of a step about their mean, as a share of it
    adding: float = 0.0  # a micro-batch's gradients to those before it


@dataclass(frozen=True, kw_only=True)
class StepTimeBreakdown:
    """Of a step, by what they go to."""

    computing: float
    straggling: float
    exchanging: float  # that no computing hides
    updating: float
    gathering: float
    asking: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())

    @property
    def exposed(self) -> float:
        """Seconds of communication."""
        return self.exchanging + self.gathering + self.asking


def step_seconds(step: ShardedStep, link: LinkModel, ranks_per_host: int = 1) -> StepTimeBreakdown:
    """With so many of the ranks on each host."""
    peers, barrier = step.ranks - 1, link.message * (step.ranks - 1).bit_length()
    bucket = step.sent_gradients / step.buckets * ranks_per_host * link.byte + peers * link.message + barrier
    hidden = BACKWARD * link.micro
    computing = step.max_micro * link.micro + (step.max_micro - 1) * link.adding
    return StepTimeBreakdown(
        computing=computing,
        straggling=computing * link.spread * expected_slowest(step.ranks),
        exchanging=bucket + max(0.0, (step.buckets - 1) * bucket - hidden),
        updating=link.update / step.ranks,
        gathering=step.sent_weights * ranks_per_host * link.byte
        + step.buckets * peers * link.message
        + barrier,
        asking=GATHERS * barrier,
    )


def expected_slowest(ranks: int) -> float:
    """The expected largest of so many standard normals."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


# ---- from what was measured ------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """A step that was run; ranks of one host beyond its processors take turns."""

    step: ShardedStep
    seconds: float
    ranks_per_host: int = 1
    crowding: float = 1.0  # ranks for each processor, where that is more than one


def predict_seconds(timed: TimedStep, link: LinkModel) -> float:
    slower = replace(link, micro=timed.crowding * link.micro, update=timed.crowding * link.update)
    return step_seconds(timed.step, slower, timed.ranks_per_host).total


STARTS = (1.0, 0.5, 0.1)  # shares of a step's seconds that computing may have, to begin with


def fit_link_model(cases: Sequence[TimedStep], rounds: int = 20) -> LinkModel:
    """What comes nearest to them, each as a share of itself: the seconds grow evenly with each unknown, until what is hidden is
    so no more; therefore it is asked again from where it was found, and the best of all is taken."""
    seconds = [each.seconds for each in cases]
    one = min(each.seconds / each.step.max_micro / each.crowding for each in cases)
    found = list[np.ndarray]()
    for start in STARTS:
        x = np.array([start * one, 1e-3, 1e-9, 1e-5, 1e-3])
        for _ in range(rounds):
            columns = [[_slope(each, x, number) for each in cases] for number in range(len(x))]
            before, x = x, least_squares(columns, seconds)
            found.append(x)
            if np.allclose(before, x, rtol=1e-9, atol=0):
                break
    return _link_model(
        min(
            found,
            key=lambda x: sum(
                (predict_seconds(each, _link_model(x)) / each.seconds - 1) ** 2 for each in cases
            ),
        )
    )


def _link_model(x: np.ndarray) -> LinkModel:
    micro, update, byte, message, late = map(float, x)
    return LinkModel(micro=micro, update=update, byte=byte, message=message, spread=late / max(micro, 1e-12))


def _slope(each: TimedStep, x: np.ndarray, number: int) -> float:
    """How the seconds grow with one of the unknowns."""
    more = x.copy()
    more[number] += max(1e-6 * x[number], 1e-12)
    return (predict_seconds(each, _link_model(more)) - predict_seconds(each, _link_model(x))) / float(
        more[number] - x[number]
    )


def least_squares(columns: Sequence[Sequence[float]], values: Sequence[float]) -> np.ndarray:
    """The unknowns, none of them below 0, that come nearest to the values, each as a share of itself.

    They are few: each choice of those that are not 0 is tried, and of two that are as near the one with fewer is taken.
    """
    rows = np.array(columns, np.float64).T / np.array(values, np.float64)[:, None]
    scales = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    best, least = np.zeros(rows.shape[1]), np.inf
    for count in range(1, rows.shape[1] + 1):
        for chosen in map(list, combinations(range(rows.shape[1]), count)):
            part = rows[:, chosen] / scales[chosen]
            found = np.linalg.lstsq(part, np.ones(len(rows)), rcond=None)[0]
            off = float(np.sum((part @ found - 1) ** 2))
            if (found >= 0).all() and off < least * (1 - 1e-9) - 1e-24:
                best, least = np.zeros(rows.shape[1]), off
                best[chosen] = found / scales[chosen]
    return best
