"""The training loop: batches, steps, validation, saves, and when to stop.

The loop is given everything and opens nothing. All micro-batches of a step are read first, so that each
token's weight is a share of the whole step's. A run can be interrupted and resumed between two micro-batches.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypedDict

from llamatrain.data.batches import Batch
from llamatrain.distributed.comm import Comm
from llamatrain.distributed.single import SingleProcess
from llamatrain.engine.profiler import phase
from llamatrain.errors import FileError
from llamatrain.grpo.metrics import RolloutMetrics, RolloutStats
from llamatrain.optim.optimizer import MinimizerState
from llamatrain.preference.batch import PreferenceMetrics, Rewards
from llamatrain.report.records import Score, StepLine
from llamatrain.rewards.processes import RewardError, shared_reward_error
from llamatrain.train.config import DONE, PAUSED, LoopConfig, StopReason
from llamatrain.train.contrastive import evaluate_texts
from llamatrain.train.evaluate import BatchLoss, LossMeter, evaluate_batch, gather_batch_losses
from llamatrain.train.parallel.step_sync import MicrobatchInfo
from llamatrain.train.prefetch import wait_clock
from llamatrain.train.programs import TrainPrograms
from llamatrain.train.protocols import (
    AnswerSource,
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
    loader: Batches
    validation: Batches | None
    config: LoopConfig
    listener: Listener
    save: Callable[[RunState, bool], str]  # (state, is_last) -> name of the checkpoint
    save_best: Callable[[RunState], None]  # writes the result as the best one
    sample: Callable[[int], None]  # (step): generates a sample
    state: RunState = field(default_factory=RunState)
    signals: Signals = field(default_factory=NoSignals)
    input_guard: InputGuard = field(default_factory=NoInputGuard)
    minimizer: MinimizerState | None = None  # of L-BFGS
    epoch_samples: int | None = None  # samples per epoch
    comm: Comm = field(default_factory=SingleProcess)
    retained: Batches | None = None  # data that should not be forgotten, scored with the validation
    answers: AnswerSource | None = None  # generates what is trained
    wants_stop: Callable[[], bool] = lambda: False  # of a callback, after each step
    pause: int = 0  # the step after which the run pauses; 0: none

    def __post_init__(self) -> None:
        self._fixed_batches: list[Batch] | None = None  # the rows of L-BFGS, the same in every step
        self._runner = StepRunner(
            programs=self.programs,
            config=self.config,
            signals=self.signals,
            input_guard=self.input_guard,
            comm=self.comm,
            minimizer=self.minimizer,
        )

    @property
    def last_checkpoint(self) -> str:
        """The name of the newest checkpoint."""
        return self._runner.last_checkpoint

    @last_checkpoint.setter
    def last_checkpoint(self, name: str) -> None:
        """Set the name of the newest checkpoint."""
        self._runner.last_checkpoint = name

    # ---- the run ----------------------------------------------------------

    def train(self) -> StopReason:
        """Train, save the final checkpoint, and return why the run stopped."""
        try:
            outcome = self._run_steps()
        except TrainingInterrupted:
            outcome = StopReason("interrupted", self._stop_signal(), finished=False)
        except InputChanged as error:  # found before the gradients were used
            self.state.partial = None
            self._save(last=True)
            raise TrainingError(
                f"{error} from step {self.state.counters.step}: {self.last_checkpoint}", code="input-changed"
            ) from None
        except RewardError as error:
            self.state.partial = None
            self._save(last=True)
            raise shared_reward_error(f"{error}; the run is saved: {self.last_checkpoint}") from None
        self._save(last=True)
        return outcome

    def _run_steps(self) -> StopReason:
        state, config = self.state, self.config
        if state.validation_due:
            self._validate()
            self._save_best()
        while not self._is_done():
            state.stop_reason = self._step()
            if self._is_due(config.eval_every, self._is_done()):
                self._validate()
            if self._is_due(config.sample_every, False):
                self._sample()
            if self._is_done():
                break
            if self._stop_signal():
                raise TrainingInterrupted
            if self._runner.time_is_up if self.comm.size > 1 else self._runner.out_of_time():
                self._validate_last_step()
                return StopReason("the time is up", finished=False)
            if self.wants_stop():
                self._validate_last_step()
                return StopReason("a callback stopped it", finished=False)
            if state.counters.step == self.pause:
                return StopReason(PAUSED, finished=False)
            if not (self._is_due(config.save_every, False) and self._save()):
                self._save_best()
        return StopReason(self._stop_reason or DONE)

    @property
    def _stop_reason(self) -> str | None:
        """Why a stop rule ended the run, or None."""
        return self.state.stop_reason or self.state.best.stop_reason(self.config.patience)

    def _is_done(self) -> bool:
        return self.state.counters.step >= self.config.iters or self._stop_reason is not None

    def _is_due(self, every: int, last: bool) -> bool:
        return every > 0 and (last or self.state.counters.step % every == 0)

    # ---- one step ----------------------------------------------------------

    def _step(self) -> str | None:
        """Take one step and report it; return the reason to stop, if there is one."""
        state, config = self.state, self.config
        start = time.perf_counter() - (state.partial.seconds if state.partial else 0.0)
        if not self._fixed_batches:  # fixed rows are read again after resuming
            state.data = self.loader.state
        waited_before = wait_clock(self.loader)
        self.comm.set_status(state.counters.step + 1, "reading rows")
        batches = self._fixed_batches or self._next_batches()
        seconds_waited = wait_clock(self.loader) - waited_before
        start += self._prepare(batches)
        preparation = time.perf_counter() - start
        microbatches = self._runner.sync_microbatches(batches)
        compute_start = time.perf_counter() - preparation  # without waiting for other ranks
        if self._stop_signal():
            raise TrainingInterrupted
        self.comm.set_status(state.counters.step + 1, "computing")
        result = self._runner.run(state, batches, microbatches, compute_start)
        reason = result.stop_reason
        if self.minimizer:
            self._fixed_batches = batches
            reason = self._next_rows(self.minimizer, reason)
        reason = reason or state.stop.observe(config.stop_rules, result.loss)
        if not self.minimizer:
            state.data = self.loader.state
        seconds = max(0.0, time.perf_counter() - start)  # a clock may stand still
        self._update_counters(microbatches, seconds)
        self._report(
            result, sum(microbatch.tokens for microbatch in microbatches), seconds, round(seconds_waited, 4)
        )
        return reason

    def _report(self, result: StepResult, tokens: int, seconds: float, seconds_waited: float) -> None:
        counters = self.state.counters
        self.listener.on_step(
            StepLine(
                step=counters.step,
                loss=result.loss,
                lr=result.rate,
                grad_norm=result.norm,
                tokens=counters.tokens,
                seconds=seconds,
                seconds_waited=seconds_waited,
                tokens_per_second=tokens / seconds if seconds else 0.0,
                evaluations=result.evaluations,
                total_seconds=counters.seconds,
                device_peak_bytes=self.programs.spec.device.peak_bytes(),
                **self._epoch_position(),
                **self._rank_stats(result),
                **self._answer_metrics(result),
            )
        )

    def _answer_metrics(self, result: StepResult) -> PreferenceMetrics | RolloutMetrics:
        """Return the metrics of compared or generated answers, or of texts."""
        if isinstance(result.rewards, RolloutStats):
            return result.rewards.metrics
        metrics = (result.rewards or Rewards()).metrics
        return metrics if result.accuracy is None else {**metrics, "accuracy": result.accuracy}

    def _epoch_position(self) -> dict[str, int]:
        """Return epoch and sample of the last sample taken, if the data has an end."""
        if not self.epoch_samples or not self.state.data or self.minimizer:
            return {}
        data = self.state.data
        epoch, sample = divmod(
            max(0, data.epoch * self.epoch_samples + data.position + data.taken - 1), self.epoch_samples
        )
        return {"epoch": epoch + 1, "sample": sample + 1, "samples": self.epoch_samples}

    def _prepare(self, batches: list[Batch]) -> float:
        """Compile the programs for these batches, and return the seconds that took.

        Until then a new run has nothing to save, and a signal ends the process at once.
        """
        seconds = self.programs.compile_for(batches)
        self.signals.can_save = True
        if self.config.sample_every and not self.state.counters.step and not self.state.partial:
            before = time.perf_counter()
            self._sample()  # the initial model; everything is compiled by now
            seconds += time.perf_counter() - before
        return seconds

    def _sample(self) -> None:
        with phase("samples"):
            self.sample(self.state.counters.step)

    def _rank_stats(self, result: StepResult) -> "RankStats":
        """Return the statistics of the ranks; all None with one rank."""
        if self.comm.size == 1:
            return RankStats(ranks=None, seconds_exposed=None, slowest=None)
        exposed = round(self.programs.exposed_seconds or 0.0, 4)
        return RankStats(ranks=self.comm.size, seconds_exposed=exposed, slowest=result.slowest_rank)

    def _stop_signal(self) -> int:
        """Return the signal that all ranks know about (0: none)."""
        return self._runner.signal if self.comm.size > 1 else self.signals.pending

    def _next_batches(self) -> list[Batch]:
        if self.answers is None:
            return self._read_batches()
        self.comm.set_status(self.state.counters.step + 1, "generating answers")
        with phase("answers"):
            return self.answers.next_batches(self.state, self._read_batches)

    def _read_batches(self) -> list[Batch]:
        batches = []
        for _ in self._runner.local_microbatches:
            if self.signals.pending and self.comm.size == 1:
                raise TrainingInterrupted
            batches.append(self.loader.batch(self.programs.spec.batch))
        return batches

    def _update_counters(self, microbatches: list[MicrobatchInfo], seconds: float) -> None:
        counters = self.state.counters
        counters.step += 1
        counters.samples += sum(microbatch.rows for microbatch in microbatches)
        counters.tokens += sum(microbatch.tokens for microbatch in microbatches)
        counters.epoch = self.state.data.epoch if self.state.data else 0
        counters.seconds += seconds

    def _next_rows(self, minimizer: MinimizerState, reason: str | None) -> str | None:
        """Switch L-BFGS to new rows once the present ones had their iterations or are exhausted.

        Rows that gave no iteration at all end the run.
        """
        limit = self.config.iters_per_rows
        if not limit or minimizer.iteration < (1 if reason else limit):
            return reason
        if reason:
            self.listener.log(f"step {self.state.counters.step + 1}: {reason}; continuing with new rows")
        self._fixed_batches, self.state.data = None, self.loader.state
        minimizer.restart()
        return None

    # ---- between steps ---------------------------------------------------

    def _validate_last_step(self) -> None:
        """Validate the last step unless that was done, so that the summary and the best file are current."""
        if self.config.eval_every and not self._is_due(self.config.eval_every, False):
            self._validate()

    def _validate(self) -> None:
        """Score the validation data, and the data that should not be forgotten; only the former chooses the best."""
        if not (self.validation or self.retained):
            return
        self.state.validation_due = True
        self.listener.show_activity()
        self.comm.set_status(self.state.counters.step, "validating")
        with phase("validation"):
            score = self._score(self.validation) if self.validation else None
            retained = self._score(self.retained) if self.retained else None
        self.state.validation_due = False
        step = self.state.counters.step
        if score:
            best = self.state.best.observe(
                score.loss, step, scheduled=self._is_due(self.config.eval_every, False)
            )
            self.listener.on_validation(step, score, best)
        if retained:
            self.listener.on_retained(step, retained)

    def _score(self, rows: Batches) -> Score:
        """Return the score of all rows, once each."""
        meter = LossMeter()
        try:
            for batch_loss in gather_batch_losses(
                self.comm, self._eval_batches(rows), lambda: self.signals.pending
            ):
                meter.add(batch_loss)
        except TrainingInterrupted as signal:
            (self._runner.signal,) = signal.args
            raise
        if meter.unreported:
            self.listener.log(
                f"warning: {meter.unreported} rewards of validation answers failed on other ranks, and were replaced"
            )
        return meter.score

    def _eval_batches(self, validation: Batches) -> Iterator[BatchLoss]:
        """Yield the losses of this rank's validation batches."""
        contrastive, rows = self.programs.spec.contrastive, self.programs.spec.batch
        for batch in validation.one_epoch(
            contrastive.rows if contrastive else rows, self.comm.rank, self.comm.size
        ):
            evaluate = evaluate_texts if contrastive else evaluate_batch
            loss = (self.answers.evaluate if self.answers else evaluate)(self.programs, batch)
            self.input_guard.check()
            yield loss

    def _save_best(self) -> None:
        """Write the best result, if this step has the best validation and no save did it."""
        if self.state.best.step == self.state.counters.step:
            with phase("saving"):
                self.save_best(self.state)

    def _save(self, last: bool = False) -> bool:
        """Save a checkpoint and return True. A failure raises if this is the last chance to save."""
        if not self.programs.weights.is_finite():
            raise TrainingError(
                f"step {self.state.counters.step}: a weight is NaN or infinite; last good "
                f"checkpoint: {self.last_checkpoint}; try a lower learning rate",
                code="not-finite",
            )
        self.comm.set_status(self.state.counters.step, "saving")
        try:
            with phase("saving"):
                self.last_checkpoint = self.save(self.state, last)
            self.listener.on_save(self.state.counters.step, self.last_checkpoint)
        except FileError as error:
            if last:
                raise
            self.listener.on_save_error(self.state.counters.step, str(error))
            return False
        return True
