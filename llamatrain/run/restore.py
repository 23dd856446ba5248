"""Restores the state that a loop starts with."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llamatrain.errors import FileError
from llamatrain.io.mapped_file import verify_unchanged
from llamatrain.optim.optimizer import MinimizerState
from llamatrain.report.report import Report
from llamatrain.run.checkpointer import restore
from llamatrain.run.prepare import PreparedRun
from llamatrain.run.rank_roles import NullListener
from llamatrain.run.resume import ResumePoint
from llamatrain.train.config import LoopConfig
from llamatrain.train.programs import TrainPrograms
from llamatrain.train.state import Best, RunState


@contextmanager
def checking_state(resume_point: ResumePoint) -> Iterator[None]:
    """Turn errors caused by nonsensical values in a checkpoint into FileError."""
    try:
        yield
    except (KeyError, ValueError, TypeError, IndexError, OverflowError) as error:
        raise FileError(
            f"{resume_point.path}: its state is damaged: {error!r}"[:200], code="damaged-checkpoint"
        ) from error


def initial_state(
    prepared: PreparedRun,
    programs: TrainPrograms,
    minimizer: MinimizerState | None,
    loop_config: LoopConfig,
    report: Report | NullListener,
) -> RunState:
    """Return the state of a new run, or that of the checkpoint with its vectors and rows restored."""
    resume_point, rows = prepared.inputs.resume_point, prepared.data.rows
    if not resume_point:  # the base's own loss is line 0
        return RunState(
            data=rows.state,
            validation_due=prepared.config.command == "finetune" and loop_config.eval_every > 0,
        )
    with checking_state(resume_point), verify_unchanged(resume_point.checkpoint.files):
        state, warnings = restore(
            resume_point.checkpoint, programs, minimizer, rows, loop_config.microbatches
        )
    for line in warnings:
        report.warn(line)
    report.set_start(resume_point.step)
    # more steps are taken after a stop rule or --epochs ended it
    if loop_config.iters > (stored_option(resume_point, "train", "iters") or 0):
        state.stop_reason = None
        if rows.end:  # a step that was left half way had fewer rows, perhaps
            rows.end, state.partial = 0, None
            state.data = rows.state
        state.best.stale = 0 if state.best.stop_reason(loop_config.patience) else state.best.stale
    if tuple(stored_option(resume_point, "data", "val") or ()) != prepared.config.data.val:
        if state.best.step is not None:
            report.warn("the validation data has changed: the best validation is determined anew")
        state.best = Best()
    return state


def stored_option(resume_point: ResumePoint, part: str, name: str) -> Any:
    """Return an option of the run that is resumed, or None."""
    options = resume_point.checkpoint.options.get(part)
    return options.get(name) if isinstance(options, dict) else None
