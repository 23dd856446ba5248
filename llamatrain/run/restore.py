"""Restores a run from its checkpoint: the weights, and the state that a loop starts with."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from llamatrain.checkpoints.checkpoint import GRADIENTS, Checkpoint
from llamatrain.errors import FileError
from llamatrain.graph.tensor import Tensor
from llamatrain.grpo.rollouts import Rollouts
from llamatrain.io.madvise import release_pages
from llamatrain.io.mapped_file import verify_unchanged
from llamatrain.optim.optimizer import MinimizerState
from llamatrain.run.dataset import CountedBatches
from llamatrain.run.resume import ResumePoint
from llamatrain.train.config import LoopConfig
from llamatrain.train.graphs import StepSpec
from llamatrain.train.programs import TrainPrograms
from llamatrain.train.state import BestValidation, RunState

if TYPE_CHECKING:
    from llamatrain.report.report import Report
    from llamatrain.run.prepare import PreparedRun
    from llamatrain.run.rank_roles import NullListener


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
    prepared: "PreparedRun",
    programs: TrainPrograms,
    minimizer: MinimizerState | None,
    loop_config: LoopConfig,
    report: "Report | NullListener",
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
        check_rollouts(state.rollouts, programs.spec, loop_config.microbatches)
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
        state.best = BestValidation()
    return state


def check_rollouts(rollouts: Rollouts | None, spec: StepSpec, microbatches: int) -> None:
    """Raise ValueError if stored answers do not fit a step or the model."""
    answers = [answer for answer in rollouts or () if answer]
    if rollouts is not None and len(rollouts) != microbatches * spec.batch:
        raise ValueError(f"{len(rollouts)} answers for {microbatches * spec.batch} rows")
    if any(max(*answer.prompt, *answer.tokens) >= spec.h.vocab for answer in answers):
        raise ValueError("an answer has unknown tokens")
    if any(len(answer.prompt) + len(answer.tokens) - 1 > spec.rope_length for answer in answers):
        raise ValueError("an answer is longer than a row")


def stored_option(resume_point: ResumePoint, part: str, name: str) -> Any:
    """Return an option of the run that is resumed, or None."""
    options = resume_point.checkpoint.options.get(part)
    return options.get(name) if isinstance(options, dict) else None


def check_weights(resume_point: ResumePoint, trainable: Mapping[str, Tensor]) -> None:
    """Raise if a checkpoint lacks trained weights, or holds state of other weights."""
    weights, order = resume_point.checkpoint.weights, resume_point.checkpoint.order
    for name, tensor in trainable.items():
        if name not in weights or weights[name].shape != tensor.shape:
            problem = f"is {list(weights[name].shape)}" if name in weights else "is missing"
            raise FileError(
                f"{resume_point.path}: {name} {problem}, expected {list(tensor.shape)}",
                code="wrong-checkpoint",
            )
    if unmatched := set(order) ^ set(trainable):
        raise FileError(
            f"{resume_point.path}: {min(unmatched)[:80]} is in the weights or in the flat vectors, but "
            "not in both",
            code="damaged-checkpoint",
        )


def load_weights(checkpoint: Checkpoint, parts: Mapping[str, np.ndarray]) -> None:
    """Copy the weights of a checkpoint into the program's memory."""
    with verify_unchanged(checkpoint.files):
        for name, part in parts.items():
            part[...] = checkpoint.weights[name]
            release_pages(checkpoint.weights[name])


def restore(
    checkpoint: Checkpoint,
    programs: TrainPrograms,
    minimizer: MinimizerState | None,
    rows: CountedBatches,
    microbatches: int,
) -> tuple[RunState, list[str]]:
    """Restore optimizer state and data position.

    Return the run's state, and warnings about what was not restored.
    """
    optimizer, state, warnings = programs.spec.optimizer, checkpoint.state, list[str]()
    assert optimizer
    if checkpoint.optimizer != optimizer.checkpoint_name:
        warnings.append(
            f"the checkpoint has the state of {checkpoint.optimizer}: the optimizer starts from zero"
        )
    else:
        for kind, name in optimizer.states.items():
            names = [
                weight
                for weight, shape in programs.spec.shapes.items()
                if optimizer.has_state(kind, weight, shape)
            ]
            programs.load_state(kind, checkpoint.split_vector(optimizer.checkpoint_key(name), names))
        if minimizer:
            minimizer.restore(checkpoint.optimizer_values_for(list(programs.weights.parts)))
    partial = None
    if state.data and not rows.restore(state.data):
        warnings.append("the data has changed: the shuffle starts again")
    elif (
        state.partial
        and programs.grads
        and programs.spec.groups == 1
        and len(state.partial.losses) < microbatches
    ):
        programs.grads.load(checkpoint.split_vector(GRADIENTS))
        partial = replace(state.partial, losses=[*state.partial.losses])
    copies: dict[str, Any] = {
        "counters": replace(state.counters),
        "stop": replace(state.stop),
        "best": replace(state.best),
    }
    return replace(state, data=rows.state, partial=partial, **copies), warnings
