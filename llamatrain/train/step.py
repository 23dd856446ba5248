"""One training step over all its micro-batches: a gradient step, or an iteration of a minimizer.

With several ranks each one runs its own micro-batches.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from llamatrain.data.batches import Batch, StepTotals
from llamatrain.distributed.comm import Comm
from llamatrain.gguf.quants import QuantError
from llamatrain.grpo.metrics import RolloutStats
from llamatrain.optim.optimizer import MinimizerState
from llamatrain.preference.batch import Rewards
from llamatrain.train.config import LoopConfig
from llamatrain.train.contrastive import compare_texts
from llamatrain.train.parallel.step_sync import MicrobatchInfo, RankStep, add_rewards, merge_steps, sum_totals
from llamatrain.train.programs import TrainPrograms
from llamatrain.train.protocols import InputChanged, InputGuard, Signals, TrainingError, TrainingInterrupted
from llamatrain.train.state import PartialStep, RunState


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The numbers of a step to report."""

    loss: float  # before the step
    norm: float
    rate: float
    evaluations: int | None = None
    stop_reason: str | None = None  # why to stop, if so
    rewards: Rewards | RolloutStats | None = None
    slowest_rank: int = 0
    accuracy: float | None = None  # in contrastive training: the share of queries closest to their positive


@dataclass(kw_only=True)
class StepRunner:
    """Runs steps; keeps what all ranks agree on: the signal and the time limit."""

    programs: TrainPrograms
    config: LoopConfig
    signals: Signals
    input_guard: InputGuard
    comm: Comm
    minimizer: MinimizerState | None

    def __post_init__(self) -> None:
        self._started = time.monotonic()
        self.last_checkpoint = "none"  # name of the newest one
        self.signal, self.time_is_up = 0, False  # the same on all ranks
        self._rewards: list[Rewards | RolloutStats] = []
        self._slowest_rank = 0
        self._first_nonfinite = ""  # the first tensor with NaN or infinity

    @property
    def local_microbatches(self) -> range:
        """The indices of this rank's micro-batches among those of a step."""
        return self.programs.local_microbatches(self.config.microbatches)

    def out_of_time(self) -> bool:
        """Return True if the time limit is reached."""
        return self.config.max_time is not None and time.monotonic() - self._started >= self.config.max_time

    def sync_microbatches(self, batches: Sequence[Batch]) -> list[MicrobatchInfo]:
        """Exchange the weights and sizes of all ranks' micro-batches, and any signal."""
        gathered = self.comm.all_gather(
            ([MicrobatchInfo.from_batch(batch) for batch in batches], self.signals.pending)
        )
        self.signal = next((signal for _, signal in gathered if signal), 0)
        return [microbatch for microbatches, _ in gathered for microbatch in microbatches]

    def run(
        self, state: RunState, batches: list[Batch], microbatches: list[MicrobatchInfo], start: float
    ) -> StepResult:
        """Run one step on this rank's batches.

        `microbatches` are those of all ranks; `start` is when the step began.
        """
        if self.programs.spec.contrastive:
            return self._contrastive_step(state, batches, microbatches, start)
        return self._step(state, batches, microbatches, start)

    def _contrastive_step(
        self, state: RunState, batches: list[Batch], microbatches: list[MicrobatchInfo], start: float
    ) -> StepResult:
        """Run a step in which the texts of all micro-batches are compared."""
        batches, comparison = compare_texts(self.programs, self.comm, batches)
        self._check_finite(state, comparison.loss, "loss")
        result = self._step(state, batches, microbatches, start)
        rows = max(1, sum(microbatch.rows for microbatch in microbatches))
        return replace(result, loss=comparison.loss, accuracy=comparison.correct / rows)

    def _step(
        self, state: RunState, batches: list[Batch], microbatches: list[MicrobatchInfo], start: float
    ) -> StepResult:
        self._rewards = []
        totals = sum_totals(microbatches)
        if self.minimizer:
            return self._minimizer_step(state, self.minimizer, batches, totals)
        rate = self.config.schedule.rate(state.counters.step + 1)
        if self.programs.spec.gradients == "streamed":
            loss, norm = self.programs.streamed_step(
                batches[0], totals, state.counters.step + 1, rate, self._dropout_key(state, 0)
            )
            self._collect_rewards(batches[0])
            self._check_finite(state, loss, "loss")
        else:
            loss, norm = self._gradient_step(state, batches, totals, rate, start)
        self._check_finite(state, norm, "norm of the gradients")
        self._round_weights(state)
        return StepResult(
            loss=loss, norm=norm, rate=rate, rewards=self._rewards_sum, slowest_rank=self._slowest_rank
        )

    def _round_weights(self, state: RunState) -> None:
        """Round the updated weights; raise on every rank if one is too large for its type."""
        try:
            self.programs.round_weights()
        except QuantError as problem:
            error = TrainingError(
                f"step {state.counters.step + 1}: {problem}; last good checkpoint: {self.last_checkpoint}; try a "
                "lower learning rate",
                code=problem.code,
            )
            error.shared = True
            raise error from None

    @property
    def _rewards_sum(self) -> Rewards | RolloutStats | None:
        return self._rewards[0] if self._rewards else None

    def _gradient_step(
        self, state: RunState, batches: list[Batch], totals: StepTotals, rate: float, start: float
    ) -> tuple[float, float]:
        """Run gradients and update; return the loss before the update and the gradients' norm."""
        partial, sharded = state.partial, self.programs.spec.groups > 1
        losses = partial.losses if partial else []
        self._rewards = [partial.rewards] if partial and partial.rewards else []
        for index in range(len(losses), len(batches)):
            if losses and self.signals.pending and self.comm.size == 1:
                state.partial = (
                    None
                    if sharded
                    else PartialStep(losses, max(0.0, time.perf_counter() - start), self._rewards_sum)
                )
                raise TrainingInterrupted
            losses.append(
                self._run_microbatch(batches[index], totals, index, self._dropout_key(state, index))
            )
            if not sharded:
                self.input_guard.check()
                self._check_finite(state, losses[-1], "loss")
        if sharded:
            losses = self._merge_ranks(losses, time.perf_counter() - start)
            for loss in losses:
                self._check_finite(state, loss, "loss")
        state.partial = None
        return math.fsum(losses), self.programs.update_weights(state.counters.step + 1, rate)

    def _merge_ranks(self, losses: list[float], seconds: float = 0.0) -> list[float]:
        """Merge the losses of all ranks; raise on every rank if one rank's input changed."""
        input_error = ""
        try:
            self.input_guard.check()
        except InputChanged as error:
            input_error = str(error)
        own_step = RankStep(
            losses=losses,
            rewards=self._rewards,
            seconds=seconds,
            signal=self.signals.pending,
            input_error=input_error,
            time_is_up=self.out_of_time(),
        )
        # after this, only sums of other ranks are waited for
        merged = merge_steps(self.comm.all_gather(own_step))
        self.programs.wait()
        if merged.input_error:
            raise InputChanged(merged.input_error)
        self.signal = self.signal or merged.signal
        self.time_is_up = merged.time_is_up
        self._slowest_rank = merged.slowest_rank
        self._rewards = [merged.rewards] if merged.rewards else []
        return merged.losses

    def _run_microbatch(self, batch: Batch, totals: StepTotals, index: int, key: tuple[int, int]) -> float:
        loss = self.programs.compute_gradients(batch, totals, index, key)
        self._collect_rewards(batch)
        # a minimizer may try points without a finite loss
        if not (math.isfinite(loss) or self._first_nonfinite or self.minimizer):
            self._first_nonfinite = self.programs.first_nonfinite()
        return loss

    def _collect_rewards(self, batch: Batch) -> None:
        if new := self.programs.rewards(batch):
            sharded = self.programs.spec.groups > 1
            self._rewards = (
                [*self._rewards, new]
                if sharded or not self._rewards
                else [add_rewards([self._rewards[0], new])]
            )

    def _dropout_key(self, state: RunState, index: int) -> tuple[int, int]:
        """Return the key of a micro-batch's dropout: the seed, and the number of its first row."""
        # line searches compare losses, so dropout must not vary
        step = 0 if self.minimizer else state.counters.step
        batches = step * self.config.microbatches + self.local_microbatches[index]
        return self.config.seed, batches * self.programs.spec.batch % (1 << 31)

    # ---- L-BFGS --------------------------------------------------------

    def _minimizer_step(
        self, state: RunState, minimizer: MinimizerState, batches: list[Batch], totals: StepTotals
    ) -> StepResult:
        """Run one iteration of a minimizer on fixed rows; the result has loss and norm before it."""
        weights, sharded = self.programs.weights, self.programs.spec.groups > 1

        def evaluate(x: np.ndarray) -> tuple[float, np.ndarray]:
            weights.vector[:] = x
            weights.push()
            losses = []
            for number, batch in enumerate(batches):
                losses.append(self._run_microbatch(batch, totals, number, self._dropout_key(state, number)))
                if not sharded:
                    self.input_guard.check()
                    if self.signals.pending:
                        raise TrainingInterrupted
            if sharded:
                losses = self._merge_ranks(losses)
            gradient = self.programs.total_gradient()
            if sharded and self.signal:
                raise TrainingInterrupted
            return math.fsum(losses), gradient

        try:
            if math.isnan(minimizer.loss):
                minimizer.begin(evaluate)
            with np.errstate(over="ignore"):  # reported as infinite
                loss = self._check_finite(state, minimizer.loss, "loss")
                norm = float(np.linalg.norm(minimizer.gradient))
            evaluations = minimizer.evaluations
            reason = minimizer.step(evaluate)
        finally:
            weights.vector[:] = minimizer.x  # the best point, not the last one tried
            weights.push()
        return StepResult(
            loss=loss,
            norm=norm,
            rate=minimizer.length,
            evaluations=evaluations,
            stop_reason=reason,
            slowest_rank=self._slowest_rank,
        )

    # ---- NaN and infinity -------------------------------------------------

    def _check_finite(self, state: RunState, value: float, what: str) -> float:
        if math.isfinite(value):
            return value
        done = state.counters.step
        hint = (
            "try a lower learning rate"
            if done
            else "no step was completed: the model itself has such numbers"
        )
        hint = self.input_guard.possible_cause or hint
        tensor = (
            next(filter(None, self.comm.all_gather(self._first_nonfinite)), "")
            or self.programs.first_nonfinite()
        )
        error = TrainingError(
            f"step {done + 1}: the {what} is {value}; first tensor with NaN or infinity: "
            f"{tensor}; last good checkpoint: {self.last_checkpoint}; {hint}",
            code="not-finite",
        )
        error.shared = True
        raise error
