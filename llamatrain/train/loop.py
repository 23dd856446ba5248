"""The training loop: batches, steps, validation, saves, and when to stop. It is given everything and opens nothing.

A step is taken on all of its micro-batches, which are read first, so that each token's weight is a share of the whole step's.
Between two micro-batches a run can be left and gone on with.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from llamatrain.data.rows import Batch
from llamatrain.engine.recorder import phase
from llamatrain.errors import FileError
from llamatrain.optim.optimizer import Descent
from llamatrain.report.events import StepLine
from llamatrain.train.around import Batches, Beside, Changed, Interrupted, Listener, Nothing, Quiet, Signals, TrainingError
from llamatrain.train.comparison import Rewards, totals_of
from llamatrain.train.course import DONE, Course, Outcome
from llamatrain.train.programs import Programs
from llamatrain.train.reading import waited
from llamatrain.train.scoring import Scoring
from llamatrain.train.state import Partial, RunState


@dataclass(kw_only=True)
class Loop:
    programs: Programs
    rows: Batches
    validation: Batches | None
    course: Course
    listener: Listener
    save: Callable[[RunState, bool], str]  # writes checkpoint and result, the last ones or not, and gives the checkpoint's name
    keep: Callable[[RunState], None]  # writes the result as the best so far
    show: Callable[[int], None]  # what the model makes by now
    state: RunState = field(default_factory=RunState)
    signals: Signals = field(default_factory=Quiet)
    beside: Beside = field(default_factory=Nothing)
    descent: Descent | None = None  # of an optimizer that goes by whole evaluations
    samples: int | None = None  # that an epoch has
    saved: str = "none"  # the newest checkpoint

    def __post_init__(self) -> None:
        self._started = time.monotonic()
        self._fixed: list[Batch] | None = None  # the rows of a descent, the same in every step
        self._rewards: Rewards | None = None  # of the answers in a step

    # ---- the story ---------------------------------------------------------

    def train(self) -> Outcome:
        try:
            outcome = self._until_the_end()
        except Interrupted:
            outcome = Outcome("interrupted", self.signals.asked, finished=False)
        except Changed as error:  # seen before its gradients were used
            self.state.partial = None
            self._save(last=True)
            raise TrainingError(f"{error} from step {self.state.counters.step}: {self.saved}") from None
        self._save(last=True)
        return outcome

    def _until_the_end(self) -> Outcome:
        state, course = self.state, self.course
        if state.owed:
            self._validate()
            self._keep_best()
        while not self._over():
            state.ended = self._step()
            if self._due(course.eval_every, self._over()):
                self._validate()
            if self._due(course.sample_every, False):
                with phase("samples"):
                    self.show(state.counters.step)
            if self._over():
                break
            if self.signals.asked:
                raise Interrupted
            if self._out_of_time():
                return Outcome("the time is up", finished=False)
            if not (self._due(course.save_every, False) and self._save()):
                self._keep_best()
        return Outcome(self._ended or DONE)

    @property
    def _ended(self) -> str | None:
        """By a rule, and why."""
        return self.state.ended or self.state.best.out_of_patience(self.course.patience)

    def _over(self) -> bool:
        return self.state.counters.step >= self.course.iters or self._ended is not None

    def _due(self, every: int, last: bool) -> bool:
        return every > 0 and (last or self.state.counters.step % every == 0)

    def _out_of_time(self) -> bool:
        return self.course.max_time is not None and time.monotonic() - self._started >= self.course.max_time

    # ---- one step ----------------------------------------------------------

    def _step(self) -> str | None:
        """Take a step and tell of it; the reason to stop, if there is one."""
        state, course = self.state, self.course
        start = time.perf_counter() - (state.partial.seconds if state.partial else 0.0)
        if not self._fixed:  # those rows are read again after a resume
            state.data = self.rows.state
        before = waited(self.rows)
        batches = self._fixed or self._batches()
        seconds_waited = waited(self.rows) - before
        start += self._prepare(batches)
        if self.descent:
            self._fixed = batches
            reason, loss, norm, evaluations = self._descend(batches)
            rate = self.descent.length
        else:
            rate, evaluations = course.schedule.rate(state.counters.step + 1), None
            loss, norm = self._descend_by_rate(batches, rate, start)
            reason = state.stop.observe(course.rules, loss)
            state.data = self.rows.state
        seconds = max(0.0, time.perf_counter() - start)  # a clock may stand still
        self._count(batches, seconds)
        counters = state.counters
        self.listener.step(
            StepLine(
                step=counters.step,
                loss=loss,
                lr=rate,
                grad_norm=norm,
                tokens=counters.tokens,
                seconds=seconds,
                seconds_waited=round(seconds_waited, 4),
                tokens_per_second=sum(batch.size for batch in batches) / seconds if seconds else 0.0,
                evaluations=evaluations,
                total_seconds=counters.seconds,
                **self._place(),
                **(self._rewards or Rewards()).facts,
            )
        )
        return reason

    def _place(self) -> dict[str, int]:
        """In the data, where there is an end to it: the epoch and the sample of it that was taken last."""
        if not self.samples or not self.state.data or self.descent:
            return {}
        data = self.state.data
        epoch, sample = divmod(max(0, data.epoch * self.samples + data.position + data.taken - 1), self.samples)
        return {"epoch": epoch + 1, "sample": sample + 1, "samples": self.samples}

    def _prepare(self, batches: list[Batch]) -> float:
        """The seconds it took. Until then a run that begins has nothing that is not saved, and a signal ends it at once."""
        seconds = self.programs.prepare(batches)
        self.signals.saving = True
        return seconds

    def _batches(self) -> list[Batch]:
        batches = []
        for _ in range(self.course.grad_acc):
            if self.signals.asked:
                raise Interrupted
            batches.append(self.rows.batch(self.programs.setting.batch))
        return batches

    def _key(self, number: int) -> tuple[int, int]:
        """What the dropouts of a step's micro-batch follow from."""
        return self.course.seed, (self.state.counters.step * self.course.grad_acc + number) % (1 << 31)

    def _count(self, batches: list[Batch], seconds: float) -> None:
        counters = self.state.counters
        counters.step += 1
        counters.samples += sum(len(batch.tokens) for batch in batches)
        counters.tokens += sum(batch.size for batch in batches)
        counters.epoch = self.state.data.epoch if self.state.data else 0
        counters.seconds += seconds

    def _descend_by_rate(self, batches: list[Batch], rate: float, start: float) -> tuple[float, float]:
        """The loss before the update, and the gradients' norm."""
        state, step, total = self.state, self.state.counters.step + 1, totals_of(batches)
        self._rewards = state.partial.rewards if state.partial else None
        if self.programs.setting.gradients == "streamed":
            loss, norm = self.programs.streamed(batches[0], total, step, rate, self._key(0))
            self._reward(batches[0])
            return self._sound(loss, "loss"), self._sound(norm, "norm of the gradients")
        losses = state.partial.losses if state.partial else []
        for number in range(len(losses), len(batches)):
            if losses and self.signals.asked:
                state.partial = Partial(losses, max(0.0, time.perf_counter() - start), self._rewards)
                raise Interrupted
            loss = self.programs.gradients(batches[number], total, number == 0, self._key(number))
            self._reward(batches[number])
            self.beside.check()
            losses.append(self._sound(loss, "loss"))
        state.partial = None
        norm = self._sound(self.programs.update(step, rate), "norm of the gradients")
        return math.fsum(losses), norm

    def _reward(self, batch: Batch) -> None:
        if new := self.programs.rewards(batch):
            self._rewards = self._rewards.plus(new) if self._rewards else new

    def _descend(self, batches: list[Batch]) -> tuple[str | None, float, float, int]:
        """One iteration on rows that stay the same. Loss and norm before it, and the evaluations that gave them."""
        assert self.descent
        total, weights, grads = totals_of(batches), self.programs.weights.vector, self.programs.grads
        assert grads

        def evaluate(x: np.ndarray) -> tuple[float, np.ndarray]:
            weights[:] = x
            losses = []
            for number, batch in enumerate(batches):
                losses.append(self.programs.gradients(batch, total, number == 0, (self.course.seed, number)))
                self.beside.check()
                if self.signals.asked:
                    raise Interrupted
            return math.fsum(losses), grads.vector

        try:
            if math.isnan(self.descent.loss):
                self.descent.begin(evaluate)
            with np.errstate(over="ignore"):  # told as infinite
                loss, norm = self._sound(self.descent.loss, "loss"), float(np.linalg.norm(self.descent.gradient))
            evaluations = self.descent.evaluations
            reason = self.descent.step(evaluate)
        finally:
            weights[:] = self.descent.x  # the best point, not the last that was tried
        reason = self._on_new_rows(self.descent, reason)
        return reason or self.state.stop.observe(self.course.rules, loss), loss, norm, evaluations

    def _on_new_rows(self, descent: Descent, reason: str | None) -> str | None:
        """It goes on with others where these have had their iterations, or give no more; rows that gave none end the run."""
        fresh = self.course.fresh
        if not fresh or descent.iteration < (1 if reason else fresh):
            return reason
        if reason:
            self.listener.say(f"step {self.state.counters.step + 1}: {reason}; it goes on with new rows")
        self._fixed, self.state.data = None, self.rows.state
        descent.renew()
        return None

    def _sound(self, value: float, what: str) -> float:
        if math.isfinite(value):
            return value
        done = self.state.counters.step
        helps = "a lower learning rate may do" if done else "nothing was learned yet: the model itself has such numbers"
        helps = self.beside.blame or helps
        raise TrainingError(
            f"step {done + 1}: the {what} is {value}; the first tensor with NaN or infinity: {self.programs.first_bad()}; "
            f"the last good checkpoint: {self.saved}; {helps}"
        )

    # ---- beside the steps --------------------------------------------------

    def _validate(self) -> None:
        if not self.validation:
            return
        self.state.owed = True
        self.listener.evaluating()
        scoring = Scoring()
        with phase("validation"):
            for batch in self.validation.once(self.programs.setting.batch):
                scoring.add(self.programs, batch)
                self.beside.check()
                if self.signals.asked:
                    raise Interrupted
        self.state.owed = False
        score, step = scoring.score, self.state.counters.step
        self.listener.validation(step, score, self.state.best.observe(score.loss, step))

    def _keep_best(self) -> None:
        """Where no save does it."""
        if self.state.best.step == self.state.counters.step:
            with phase("saving"):
                self.keep(self.state)

    def _save(self, last: bool = False) -> bool:
        """Whether it was; where there is no other time it must be."""
        if not math.isfinite(float(self.programs.weights.vector.sum(dtype=np.float64))):
            raise TrainingError(
                f"step {self.state.counters.step}: a weight is NaN or infinite; the last good checkpoint: {self.saved}; "
                "a lower learning rate may do"
            )
        try:
            with phase("saving"):
                self.saved = self.save(self.state, last)
            self.listener.saved(self.state.counters.step, self.saved)
        except FileError as error:
            if last:
                raise
            self.listener.unsaved(self.state.counters.step, str(error))
            return False
        return True
