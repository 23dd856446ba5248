"""The training loop: batches, steps, reports, validation, saves, and when to stop. It is given everything and opens nothing.

A step is taken on all of its micro-batches, which are read first, so that each token's weight is a share of the whole step's.
Between two micro-batches a run can be left and gone on with.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from llamatrain.data.rows import Batch, State
from llamatrain.errors import LlamatrainError
from llamatrain.optim.lbfgs import Lbfgs
from llamatrain.optim.schedule import Schedule
from llamatrain.optim.stop import StopRules, StopState
from llamatrain.recipe.interrupts import Interrupts
from llamatrain.recipe.options import RunOptions
from llamatrain.report.report import Report, StepLine
from llamatrain.store.checkpoint import Counters, Partial
from llamatrain.train.programs import Programs


class TrainingError(LlamatrainError):
    """A loss or a gradient that is no number."""


class Interrupted(Exception):
    """A signal came: the run is to be saved as it stands."""


class Rows(Protocol):
    """Where batches come from."""

    @property
    def state(self) -> State: ...

    def restore(self, state: State) -> bool: ...

    def batch(self, count: int) -> Batch: ...

    def once(self, count: int) -> Iterator[Batch]: ...


@dataclass(frozen=True)
class Outcome:
    """Why a run ended, and by which signal, if by one."""

    reason: str
    signal: int = 0
    finished: bool = True


@dataclass
class Loop:
    programs: Programs
    rows: Rows
    validation: Rows | None
    schedule: Schedule
    rules: StopRules
    run: RunOptions
    iters: int
    grad_acc: int
    report: Report
    save: Callable[["Loop"], str]  # writes checkpoint and result, and gives the checkpoint's name
    show: Callable[[int], None]  # what the model makes by now
    lbfgs: Lbfgs | None = None
    counters: Counters = field(default_factory=Counters)
    stop: StopState = field(default_factory=StopState)
    partial: Partial | None = None
    interrupts: Interrupts = field(default_factory=Interrupts)
    seed: int = 0
    owed: bool = False  # the validation of the step that was done last
    ended: str | None = None  # by a stop rule, and why
    saved: str = "none"  # the newest checkpoint
    data: State | None = None  # where the data stands: before a step that is under way, after one that is done

    def __post_init__(self) -> None:
        self._started = time.monotonic()
        self._fixed: list[Batch] | None = None  # L-BFGS's rows, the same in every step

    # ---- the story ---------------------------------------------------------

    def train(self) -> Outcome:
        try:
            outcome = self._until_the_end()
        except Interrupted:
            outcome = Outcome("interrupted", self.interrupts.asked, finished=False)
        self._save()
        return outcome

    def _until_the_end(self) -> Outcome:
        if self.owed:
            self._validate()
        while self.counters.step < self.iters and not self.ended:
            reason = self.ended = self._step()
            last = self.counters.step == self.iters or reason is not None
            if self._due(self.run.eval_every, last):
                self._validate()
            if self._due(self.run.sample_every, False):
                self.show(self.counters.step)
            if self.interrupts.asked and not last:
                raise Interrupted
            if not last and self._out_of_time():
                return Outcome("the time is up", finished=False)
            if self._due(self.run.save_every, False) and not last:
                self._save()
        return Outcome(self.ended or "done")

    def _due(self, every: int, last: bool) -> bool:
        return every > 0 and (last or self.counters.step % every == 0)

    def _out_of_time(self) -> bool:
        return self.run.max_time is not None and time.monotonic() - self._started >= self.run.max_time

    # ---- one step ----------------------------------------------------------

    def _step(self) -> str | None:
        """Take a step and report it; the reason to stop, if there is one."""
        start = time.perf_counter() - (self.partial.extra["seconds"] if self.partial else 0.0)
        if not self._fixed:  # those rows are read again after a resume
            self.data = self.rows.state
        if self.lbfgs:
            batches = self._fixed = self._fixed or self._batches()
            start += self._prepare(batches)
            reason, loss, norm, evaluations = self._descend(batches)
            rate = self.lbfgs.length
        else:
            batches, rate, evaluations = self._batches(), self.schedule.rate(self.counters.step + 1), None
            start += self._prepare(batches)
            loss, norm = self._descend_by_rate(batches, rate, start)
            reason = self.stop.observe(self.rules, loss)
            self.data = self.rows.state
        seconds = time.perf_counter() - start
        self._count(batches, seconds)
        speed = sum(batch.size for batch in batches) / seconds
        counters = self.counters
        self.report.step(StepLine(counters.step, loss, rate, norm, counters.tokens, seconds, speed, evaluations))
        return reason

    def _prepare(self, batches: list[Batch]) -> float:
        """The seconds it took. Until then a run that begins has nothing that is not saved, and a signal ends it at once."""
        seconds = self.programs.prepare(batches)
        self.interrupts.saving = True
        return seconds

    def _batches(self) -> list[Batch]:
        batches = []
        for _ in range(self.grad_acc):
            if self.interrupts.asked:
                raise Interrupted
            batches.append(self.rows.batch(self.programs.setting.batch))
        return batches

    def _key(self, number: int) -> tuple[int, int]:
        """What the dropouts of a step's micro-batch follow from."""
        return self.seed, (self.counters.step * self.grad_acc + number) % (1 << 31)

    def _count(self, batches: list[Batch], seconds: float) -> None:
        self.counters.step += 1
        self.counters.samples += sum(len(batch.tokens) for batch in batches)
        self.counters.tokens += sum(batch.size for batch in batches)
        self.counters.epoch = self.data.epoch if self.data else 0
        self.counters.seconds += seconds

    def _descend_by_rate(self, batches: list[Batch], rate: float, start: float) -> tuple[float, float]:
        """AdamW or SGD: the loss before the update, and the gradients' norm."""
        step, total = self.counters.step + 1, total_weight(batches)
        if self.programs.setting.gradients == "streamed":
            loss, norm = self.programs.streamed(batches[0], total, step, rate, self._key(0))
            return self._sound(loss, "loss"), self._sound(norm, "norm of the gradients")
        losses = self.partial.losses if self.partial else []
        for number in range(len(losses), len(batches)):
            if losses and self.interrupts.asked:
                self.partial = Partial(len(losses), losses, {"seconds": time.perf_counter() - start})
                raise Interrupted
            losses.append(self._sound(self.programs.gradients(batches[number], total, number == 0, self._key(number)), "loss"))
        self.partial = None
        norm = self._sound(self.programs.update(step, rate), "norm of the gradients")
        return math.fsum(losses), norm

    def _descend(self, batches: list[Batch]) -> tuple[str | None, float, float, int]:
        """L-BFGS: one iteration on rows that stay the same. Loss and norm before it, and the evaluations that gave them."""
        assert self.lbfgs
        total, weights, grads = total_weight(batches), self.programs.weights.vector, self.programs.grads
        assert grads

        def evaluate(x: np.ndarray) -> tuple[float, np.ndarray]:
            weights[:] = x
            losses = []
            for number, batch in enumerate(batches):
                losses.append(self.programs.gradients(batch, total, number == 0, (self.seed, number)))
                if self.interrupts.asked:
                    raise Interrupted
            return math.fsum(losses), grads.vector

        try:
            if math.isnan(self.lbfgs.loss):
                self.lbfgs.begin(evaluate)
            loss, norm = self._sound(self.lbfgs.loss, "loss"), float(np.linalg.norm(self.lbfgs.gradient))
            evaluations = self.lbfgs.evaluations
            reason = self.lbfgs.step(evaluate)
        finally:
            weights[:] = self.lbfgs.x  # the best point, not the last that was tried
        return reason or self.stop.observe(self.rules, loss), loss, norm, evaluations

    def _sound(self, value: float, what: str) -> float:
        if math.isfinite(value):
            return value
        step = self.counters.step + 1
        helps = "a lower --lr may do" if self.counters.step else "nothing was learned yet: the model itself has such numbers"
        raise TrainingError(
            f"step {step}: the {what} is {value}; the first tensor with NaN or infinity: {self.programs.first_bad()}; "
            f"the last good checkpoint: {self.saved}; {helps}"
        )

    # ---- beside the steps --------------------------------------------------

    def _validate(self) -> None:
        if not self.validation:
            return
        self.owed = True
        self.report.evaluating()
        losses, weight, tokens = [], 0.0, 0
        for batch in self.validation.once(self.programs.setting.batch):
            losses.append(self.programs.loss(batch))
            weight += total_weight([batch])
            tokens += int(np.count_nonzero(batch.weights))
            if self.interrupts.asked:
                raise Interrupted
        self.owed = False
        self.report.validation(self.counters.step, math.fsum(losses) / weight, tokens)

    def _save(self) -> None:
        if not math.isfinite(float(self.programs.weights.vector.sum(dtype=np.float64))):
            raise TrainingError(
                f"step {self.counters.step}: a weight is NaN or infinite; the last good checkpoint: {self.saved}; "
                "a lower --lr may do"
            )
        self.data = self.data or self.rows.state
        self.saved = self.save(self)
        self.report.saved(self.counters.step, self.saved)


def total_weight(batches: list[Batch]) -> float:
    return float(sum(batch.weights.sum(dtype=np.float64) for batch in batches))
