"""How well a model foretells data, over its batches.

The loss is a sum over tokens, weighted, by the sum of the weights; its standard error is that of such a ratio over batches, which
for batches of one size is llama.cpp's (ggml_opt_result_loss). The accuracy's is that of a share of the tokens.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from llamatrain.data.rows import Batch
from llamatrain.machine.world import World
from llamatrain.report.events import Score
from llamatrain.train.around import Changed, Interrupted
from llamatrain.train.comparison import Rewards
from llamatrain.train.programs import Runner


class Verdict(NamedTuple):
    """A batch's losses, added up."""

    loss: float
    weight: float
    tokens: int
    right: int | None
    rewards: Rewards | None = None  # of answers that are compared
    words: tuple[tuple[float, float], ...] = ()  # of chosen answers: losses, and how many tokens


def judged(runner: Runner, batch: Batch) -> Verdict:
    (loss, right), tokens = runner.judged(batch), int(np.count_nonzero(batch.weights))
    if batch.compared and (rewards := runner.rewards(batch)):
        words = tuple((each, float(batch.compared.words)) for each in runner.terms()[1:])
        return Verdict(loss, batch.compared.count, tokens, None, rewards, words)
    return Verdict(loss, float(batch.weights.sum(dtype=np.float64)), tokens, right)


def judged_by_all(world: World, mine: Iterator[Verdict], asked: Callable[[], int] = int) -> Iterator[Verdict]:
    """Batch by batch, of which each rank has every so many-th; until a signal comes to one of them."""
    while True:
        one, changed = None, ""  # what has befallen one has befallen all
        try:
            one = next(mine, None)
        except Changed as error:
            changed = str(error)
        told = world.gathered((one, asked(), changed))
        if found := next((changed for *_, changed in told if changed), ""):
            raise Changed(found)
        if signal := next((signal for _, signal, _ in told if signal), 0):
            raise Interrupted(signal)
        yield from (each for each, *_ in told if each)
        if not all(each for each, *_ in told):
            return


@dataclass
class Scoring:
    losses: list[float] = field(default_factory=list)  # of batches, sums
    weights: list[float] = field(default_factory=list)
    tokens: int = 0
    right: int | None = 0
    rewards: Rewards | None = None
    words: list[tuple[float, float]] = field(default_factory=list)

    def add(self, one: Verdict) -> None:
        self.losses.append(one.loss)
        self.weights.append(one.weight)
        self.tokens += one.tokens
        if one.rewards:
            self.rewards = self.rewards.plus(one.rewards) if self.rewards else one.rewards
            self.words += one.words
            return
        self.right = None if one.right is None or self.right is None else self.right + one.right

    @property
    def score(self) -> Score:
        if self.rewards:
            return self._compared(self.rewards)
        count, total, tokens = len(self.losses), math.fsum(self.weights), self.tokens
        loss = math.fsum(self.losses) / total
        error = accuracy = spread = None
        if count > 1 and math.isfinite(loss):
            apart = ((one - loss * weight) ** 2 for one, weight in zip(self.losses, self.weights, strict=True))
            error = math.sqrt(math.fsum(apart) * count / (count - 1)) / total
        if self.right is not None and math.isfinite(loss):
            accuracy = self.right / tokens
            spread = math.sqrt(accuracy * (1 - accuracy) / (tokens - 1)) if tokens > 1 else None
        return Score(loss=loss, loss_error=error, accuracy=accuracy, accuracy_error=spread, tokens=tokens)

    def _compared(self, rewards: Rewards) -> Score:
        """Each term is a mean over what is of its kind; how they err is reckoned of both together."""
        kinds: list[list[tuple[float, float]]] = [list(zip(self.losses, self.weights, strict=True)), self.words]
        loss, apart = 0.0, np.zeros(len(self.losses))
        for kind in filter(None, kinds):
            sums, counts = np.array(kind, np.float64).T
            mean = math.fsum(sums) / math.fsum(counts)
            loss, apart = loss + mean, apart + (sums - mean * counts) / counts.sum()
        facts, count, error = rewards.facts, len(apart), None
        if count > 1 and math.isfinite(loss):
            error = math.sqrt(math.fsum(apart**2) * count / (count - 1))
        right, judged = facts["accuracy"], rewards.judged
        spread = math.sqrt(right * (1 - right) / (judged - 1)) if right is not None and judged > 1 else None
        return Score(loss=loss, loss_error=error, accuracy_error=spread, tokens=self.tokens, answers=judged, **facts)
