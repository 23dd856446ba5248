"""The training loop: batches, steps, validation, saves, and when to stop.

The loop is given everything and opens nothing. All micro-batches of a step are read first, so that each
token's weight is a share of the whole step's. A run can be interrupted and resumed between two micro-batches.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np

from llamatrain.data.batches import Batch
from llamatrain.distributed.comm import Comm
from llamatrain.distributed.single import SingleProcess
from llamatrain.engine.profiler import phase
from llamatrain.errors import FileError
from llamatrain.optim.optimizer import MinimizerState
from llamatrain.preference.batch import Rewards
from llamatrain.report.records import StepLine
from llamatrain.train.config import DONE, LoopConfig, StopReason
from llamatrain.train.evaluate import BatchLoss, LossMeter, judged, judged_by_all
from llamatrain.train.parallel.step_sync import MicrobatchInfo
from llamatrain.train.prefetch import waited
from llamatrain.train.programs import TrainPrograms
from llamatrain.train.protocols import (
    Batches,
    InputChanged,
    InputGuard,
    Listener,
    NoInputGuard,
    NoSignals,
    Signals,
    TrainingError,
    TrainingInterrupted,
)
from llamatrain.train.state import RunState
from llamatrain.train.step import StepResult, StepRunner


class RankStats(TypedDict):
    """Fields of a step's metrics that exist only with several ranks."""

    ranks: int | None
    seconds_exposed: float | None
    slowest: int | None


@dataclass(kw_only=True)
class Loop:
    """Runs steps until the run is complete, stopped by a rule, out of time or interrupted."""

    programs: TrainPrograms
    rows: Batches
    validation: Batches | None
    course: LoopConfig
    listener: Listener
    save: Callable[
        [RunState, bool], str
    ]  # writes checkpoint and result, the last ones or not, and gives the checkpoint's name
    keep: Callable[[RunState], None]  # writes the result as the best so far
    show: Callable[[int], None]  # what the model makes by now
    state: RunState = field(default_factory=RunState)
    signals: Signals = field(default_factory=NoSignals)
    beside: InputGuard = field(default_factory=NoInputGuard)
    descent: MinimizerState | None = None  # of an optimizer that goes by whole evaluations
    samples: int | None = None  # that an epoch has
    world: Comm = field(default_factory=SingleProcess)

    def __post_init__(self) -> None:
        self._fixed: list[Batch] | None = None  # the rows of a descent, the same in every step
        self._stepping = StepRunner(
            programs=self.programs,
            course=self.course,
            signals=self.signals,
            beside=self.beside,
            world=self.world,
            descent=self.descent,
        )

    @property
    def saved(self) -> str:
        """The name of the newest checkpoint."""
        return self._stepping.saved

    @saved.setter
    def saved(self, name: str) -> None:
        """The name of the newest checkpoint."""
        self._stepping.saved = name

    # ---- the story ---------------------------------------------------------

    def train(self) -> StopReason:
        """Train, save the final checkpoint, and return why the run stopped."""
        try:
            outcome = self._until_the_end()
        except TrainingInterrupted:
            outcome = StopReason("interrupted", self._asked(), finished=False)
        except InputChanged as error:  # seen before its gradients were used
            self.state.partial = None
            self._save(last=True)
            raise TrainingError(f"{error} from step {self.state.counters.step}: {self.saved}") from None
        self._save(last=True)
        return outcome

    def _until_the_end(self) -> StopReason:
        state, course = self.state, self.course
        if state.owed:
            self._validate()
            self._keep_best()
        while not self._over():
            state.ended = self._step()
            if self._due(course.eval_every, self._over()):
                self._validate()
            if self._due(course.sample_every, False):
                self._show()
            if self._over():
                break
            if self._asked():
                raise TrainingInterrupted
            if self._stepping.late if self.world.size > 1 else self._stepping.out_of_time():
                self._validate_at_the_end()
                return StopReason("the time is up", finished=False)
            if not (self._due(course.save_every, False) and self._save()):
                self._keep_best()
        return StopReason(self._ended or DONE)

    @property
    def _ended(self) -> str | None:
        """Why a stop rule ended the run, or None."""
        return self.state.ended or self.state.best.out_of_patience(self.course.patience)

    def _over(self) -> bool:
        return self.state.counters.step >= self.course.iters or self._ended is not None

    def _due(self, every: int, last: bool) -> bool:
        return every > 0 and (last or self.state.counters.step % every == 0)

    # ---- one step ----------------------------------------------------------

    def _step(self) -> str | None:
        """Take one step and report it; return the reason to stop, if there is one."""
        state, course = self.state, self.course
        start = time.perf_counter() - (state.partial.seconds if state.partial else 0.0)
        if not self._fixed:  # those rows are read again after a resume
            state.data = self.rows.state
        before = waited(self.rows)
        self.world.doing(state.counters.step + 1, "reading rows")
        batches = self._fixed or self._batches()
        seconds_waited = waited(self.rows) - before
        start += self._prepare(batches)
        ready = time.perf_counter() - start
        weighed = self._stepping.agreed(batches)
        since = time.perf_counter() - ready  # without the time in which others were waited for
        if self._asked():
            raise TrainingInterrupted
        self.world.doing(state.counters.step + 1, "computing")
        taken = self._stepping.take(state, batches, weighed, since)
        reason = taken.reason
        if self.descent:
            self._fixed = batches
            reason = self._on_new_rows(self.descent, reason)
        reason = reason or state.stop.observe(course.rules, taken.loss)
        if not self.descent:
            state.data = self.rows.state
        seconds = max(0.0, time.perf_counter() - start)  # a clock may stand still
        self._count(weighed, seconds)
        self._tell(taken, sum(each.tokens for each in weighed), seconds, round(seconds_waited, 4))
        return reason

    def _tell(self, taken: StepResult, tokens: int, seconds: float, seconds_waited: float) -> None:
        counters = self.state.counters
        self.listener.step(
            StepLine(
                step=counters.step,
                loss=taken.loss,
                lr=taken.rate,
                grad_norm=taken.norm,
                tokens=counters.tokens,
                seconds=seconds,
                seconds_waited=seconds_waited,
                tokens_per_second=tokens / seconds if seconds else 0.0,
                evaluations=taken.evaluations,
                total_seconds=counters.seconds,
                **self._place(),
                **self._among(taken),
                **(taken.rewards or Rewards()).facts,
            )
        )

    def _place(self) -> dict[str, int]:
        """Return epoch and sample of the last sample taken, if the data has an end."""
        if not self.samples or not self.state.data or self.descent:
            return {}
        data = self.state.data
        epoch, sample = divmod(
            max(0, data.epoch * self.samples + data.position + data.taken - 1), self.samples
        )
        return {"epoch": epoch + 1, "sample": sample + 1, "samples": self.samples}

    def _prepare(self, batches: list[Batch]) -> float:
        """Compile the programs for these batches, and return the seconds that took.

        Until then a new run has nothing to save, and a signal ends the process at once.
        """
        seconds = self.programs.prepare(batches)
        self.signals.saving = True
        if self.course.sample_every and not self.state.counters.step and not self.state.partial:
            before = time.perf_counter()
            self._show()  # where it begins from, once all is compiled at once
            seconds += time.perf_counter() - before
        return seconds

    def _show(self) -> None:
        with phase("samples"):
            self.show(self.state.counters.step)

    def _among(self, taken: StepResult) -> "RankStats":
        """Return the statistics of the ranks; all None with one rank."""
        if self.world.size == 1:
            return RankStats(ranks=None, seconds_exposed=None, slowest=None)
        exposed = round(self.programs.exposed or 0.0, 4)
        return RankStats(ranks=self.world.size, seconds_exposed=exposed, slowest=taken.slowest)

    def _asked(self) -> int:
        """Return the signal that all ranks know about (0: none)."""
        return self._stepping.asked if self.world.size > 1 else self.signals.asked

    def _batches(self) -> list[Batch]:
        batches = []
        for _ in self._stepping.own:
            if self.signals.asked and self.world.size == 1:
                raise TrainingInterrupted
            batches.append(self.rows.batch(self.programs.setting.batch))
        return batches

    def _count(self, weighed: list[MicrobatchInfo], seconds: float) -> None:
        counters = self.state.counters
        counters.step += 1
        counters.samples += sum(each.rows for each in weighed)
        counters.tokens += sum(each.tokens for each in weighed)
        counters.epoch = self.state.data.epoch if self.state.data else 0
        counters.seconds += seconds

    def _on_new_rows(self, descent: MinimizerState, reason: str | None) -> str | None:
        """Switch L-BFGS to new rows once the present ones had their iterations or are exhausted.

        Rows that gave no iteration at all end the run.
        """
        fresh = self.course.fresh
        if not fresh or descent.iteration < (1 if reason else fresh):
            return reason
        if reason:
            self.listener.say(f"step {self.state.counters.step + 1}: {reason}; it goes on with new rows")
        self._fixed, self.state.data = None, self.rows.state
        descent.renew()
        return None

    # ---- beside the steps --------------------------------------------------

    def _validate_at_the_end(self) -> None:
        """Validate the last step unless that was done, so that the summary and the best file are current."""
        if self.course.eval_every and not self._due(self.course.eval_every, False):
            self._validate()

    def _validate(self) -> None:
        if not self.validation:
            return
        self.state.owed = True
        self.listener.evaluating()
        self.world.doing(self.state.counters.step, "validating")
        scoring = LossMeter()
        with phase("validation"):
            try:
                for each in judged_by_all(
                    self.world, self._judged(self.validation), lambda: self.signals.asked
                ):
                    scoring.add(each)
            except TrainingInterrupted as signal:
                (self._stepping.asked,) = signal.args
                raise
        self.state.owed = False
        score, step = scoring.score, self.state.counters.step
        best = self.state.best.observe(score.loss, step, due=self._due(self.course.eval_every, False))
        self.listener.validation(step, score, best)

    def _judged(self, validation: Batches) -> Iterator[BatchLoss]:
        """Yield the losses of this rank's validation batches."""
        for batch in validation.once(self.programs.setting.batch, self.world.rank, self.world.size):
            one = judged(self.programs, batch)
            self.beside.check()
            yield one

    def _keep_best(self) -> None:
        """Write the best result, if this step has the best validation and no save did it."""
        if self.state.best.step == self.state.counters.step:
            with phase("saving"):
                self.keep(self.state)

    def _save(self, last: bool = False) -> bool:
        """Save a checkpoint and return True. A failure raises if this is the last chance to save."""
        if not math.isfinite(float(self.programs.weights.vector.sum(dtype=np.float64))):
            raise TrainingError(
                f"step {self.state.counters.step}: a weight is NaN or infinite; the last good checkpoint: {self.saved}; "
                "a lower learning rate may do"
            )
        self.world.doing(self.state.counters.step, "saving")
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
