"""One training step over all its micro-batches: a gradient step, or an iteration of a minimizer.

With several ranks each one runs its own micro-batches.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llamatrain.data.batches import Batch
from llamatrain.distributed.comm import Comm
from llamatrain.optim.optimizer import MinimizerState
from llamatrain.preference.batch import PreferenceTotals, Rewards
from llamatrain.train.config import LoopConfig
from llamatrain.train.parallel.step_sync import MicrobatchInfo, RankStep, totals_of, whole_of
from llamatrain.train.programs import TrainPrograms
from llamatrain.train.protocols import InputChanged, InputGuard, Signals, TrainingError, TrainingInterrupted
from llamatrain.train.state import Partial, RunState


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The numbers of a step to report."""

    loss: float  # before it
    norm: float
    rate: float
    evaluations: int | None = None
    reason: str | None = None  # to stop
    rewards: Rewards | None = None
    slowest: int = 0


@dataclass(kw_only=True)
class StepRunner:
    """Runs steps; keeps what all ranks agree on: the signal and the time limit."""

    programs: TrainPrograms
    course: LoopConfig
    signals: Signals
    beside: InputGuard
    world: Comm
    descent: MinimizerState | None

    def __post_init__(self) -> None:
        self._started = time.monotonic()
        self.saved = "none"  # the newest checkpoint
        self.asked, self.late = 0, False  # the signal, and that the time is up, as all ranks know it
        self._rewards: list[Rewards] = []
        self._slowest = 0
        self._bad = ""  # the first tensor that is no number

    @property
    def own(self) -> range:
        """The indices of this rank's micro-batches among those of a step."""
        return self.programs.share(self.course.grad_acc)

    def out_of_time(self) -> bool:
        """Return True if the time limit is reached."""
        return self.course.max_time is not None and time.monotonic() - self._started >= self.course.max_time

    def agreed(self, batches: Sequence[Batch]) -> list[MicrobatchInfo]:
        """Exchange the weights and sizes of all ranks' micro-batches, and any signal."""
        told = self.world.gathered(([MicrobatchInfo.of(batch) for batch in batches], self.signals.asked))
        self.asked = next((asked for _, asked in told if asked), 0)
        return [each for weighed, _ in told for each in weighed]

    def take(
        self, state: RunState, batches: list[Batch], weighed: list[MicrobatchInfo], start: float
    ) -> StepResult:
        """Run one step on this rank's batches.

        `weighed` has the totals of all micro-batches; `start` is when the step began.
        """
        self._rewards = []
        total = totals_of(weighed)
        if self.descent:
            return self._by_descent(state, self.descent, batches, total)
        rate = self.course.schedule.rate(state.counters.step + 1)
        if self.programs.setting.gradients == "streamed":
            loss, norm = self.programs.streamed(
                batches[0], total, state.counters.step + 1, rate, self._key(state, 0)
            )
            self._reward(batches[0])
            self._sound(state, loss, "loss")
        else:
            loss, norm = self._by_rate(state, batches, total, rate, start)
        self._sound(state, norm, "norm of the gradients")
        return StepResult(loss=loss, norm=norm, rate=rate, rewards=self._added, slowest=self._slowest)

    @property
    def _added(self) -> Rewards | None:
        return self._rewards[0] if self._rewards else None

    def _by_rate(
        self, state: RunState, batches: list[Batch], total: PreferenceTotals, rate: float, start: float
    ) -> tuple[float, float]:
        """Run gradients and update; return the loss before the update and the gradients' norm."""
        partial, divided = state.partial, self.programs.setting.groups > 1
        losses = partial.losses if partial else []
        self._rewards = [partial.rewards] if partial and partial.rewards else []
        for number in range(len(losses), len(batches)):
            if losses and self.signals.asked and self.world.size == 1:
                state.partial = (
                    None if divided else Partial(losses, max(0.0, time.perf_counter() - start), self._added)
                )
                raise TrainingInterrupted
            losses.append(self._gradients(batches[number], total, number, self._key(state, number)))
            if not divided:
                self.beside.check()
                self._sound(state, losses[-1], "loss")
        if divided:
            losses = self._whole(losses, time.perf_counter() - start)
            for loss in losses:
                self._sound(state, loss, "loss")
        state.partial = None
        return math.fsum(losses), self.programs.update(state.counters.step + 1, rate)

    def _whole(self, losses: list[float], seconds: float = 0.0) -> list[float]:
        """Merge the losses of all ranks; raise on every rank if one rank's input changed."""
        changed = ""
        try:
            self.beside.check()
        except InputChanged as error:
            changed = str(error)
        part = RankStep(
            losses=losses,
            rewards=self._rewards,
            seconds=seconds,
            asked=self.signals.asked,
            changed=changed,
            late=self.out_of_time(),
        )
        whole = whole_of(
            self.world.gathered(part)
        )  # from here on it is others' sums that are waited for, not others
        self.programs.settle()
        if whole.changed:
            raise InputChanged(whole.changed)
        self.asked, self.late, self._slowest = self.asked or whole.asked, whole.late, whole.slowest
        self._rewards = [whole.rewards] if whole.rewards else []
        return whole.losses

    def _gradients(self, batch: Batch, total: PreferenceTotals, number: int, key: tuple[int, int]) -> float:
        loss = self.programs.gradients(batch, total, number, key)
        self._reward(batch)
        if not (math.isfinite(loss) or self._bad or self.descent):  # which may try points that have no loss
            self._bad = self.programs.first_bad()
        return loss

    def _reward(self, batch: Batch) -> None:
        if new := self.programs.rewards(batch):
            divided = self.programs.setting.groups > 1
            self._rewards = (
                [*self._rewards, new] if divided or not self._rewards else [self._rewards[0].plus(new)]
            )

    def _key(self, state: RunState, number: int) -> tuple[int, int]:
        """Return the key of a micro-batch's dropout: the seed, and the number of its first row."""
        step = 0 if self.descent else state.counters.step  # whose line searches compare losses
        batches = step * self.course.grad_acc + self.own[number]
        return self.course.seed, batches * self.programs.setting.batch % (1 << 31)

    # ---- by whole evaluations ----------------------------------------------

    def _by_descent(
        self, state: RunState, descent: MinimizerState, batches: list[Batch], total: PreferenceTotals
    ) -> StepResult:
        """Run one iteration of a minimizer on fixed rows; the result has loss and norm before it."""
        weights, divided = self.programs.weights.vector, self.programs.setting.groups > 1

        def evaluate(x: np.ndarray) -> tuple[float, np.ndarray]:
            weights[:] = x
            losses = []
            for number, batch in enumerate(batches):
                losses.append(self._gradients(batch, total, number, self._key(state, number)))
                if not divided:
                    self.beside.check()
                    if self.signals.asked:
                        raise TrainingInterrupted
            if divided:
                losses = self._whole(losses)
            gradient = self.programs.summed()
            if divided and self.asked:
                raise TrainingInterrupted
            return math.fsum(losses), gradient

        try:
            if math.isnan(descent.loss):
                descent.begin(evaluate)
            with np.errstate(over="ignore"):  # told as infinite
                loss, norm = self._sound(state, descent.loss, "loss"), float(np.linalg.norm(descent.gradient))
            evaluations = descent.evaluations
            reason = descent.step(evaluate)
        finally:
            weights[:] = descent.x  # the best point, not the last that was tried
        return StepResult(
            loss=loss,
            norm=norm,
            rate=descent.length,
            evaluations=evaluations,
            reason=reason,
            slowest=self._slowest,
        )

    # ---- what is no number -------------------------------------------------

    def _sound(self, state: RunState, value: float, what: str) -> float:
        if math.isfinite(value):
            return value
        done = state.counters.step
        helps = (
            "a lower learning rate may do"
            if done
            else "nothing was learned yet: the model itself has such numbers"
        )
        helps = self.beside.blame or helps
        bad = next(filter(None, self.world.gathered(self._bad)), "") or self.programs.first_bad()
        error = TrainingError(
            f"step {done + 1}: the {what} is {value}; the first tensor with NaN or infinity: {bad}; "
            f"the last good checkpoint: {self.saved}; {helps}"
        )
        error.shared = True
        raise error
