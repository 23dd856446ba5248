"""Runs a request: opens the folder, prepares the run, trains, and reports the result."""

import os
import shlex
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from llamatrain.checkpoints.checkpoint import read_stored_checksum
from llamatrain.checkpoints.filenames import numbered_checkpoints
from llamatrain.checkpoints.run_folder import RunFolder
from llamatrain.checkpoints.signature import SIGNATURE, sign
from llamatrain.config.options import format_flag
from llamatrain.data.options import DataOptions
from llamatrain.distributed.comm import get_comm
from llamatrain.distributed.once import run_once_per_value
from llamatrain.engine.backend import kernel_class
from llamatrain.engine.profiler import phase
from llamatrain.errors import UsageError
from llamatrain.io.mapped_file import verify_unchanged
from llamatrain.platform.terminal import is_verbose, log_line
from llamatrain.report.console import null_console
from llamatrain.report.report import Report
from llamatrain.run.build import build_loop, build_programs, run_loop
from llamatrain.run.checkpointer import Checkpointer, check_weights
from llamatrain.run.choose_trainable import choose_trainable
from llamatrain.run.config import RunConfig
from llamatrain.run.extra_output_options import ExtraOutputOptions
from llamatrain.run.extra_outputs import ExtraOutputs, check_extra_outputs, drop_unnamed, format_flags
from llamatrain.run.inputs import (
    TEACHER,
    RunInputs,
    file_identity,
    fingerprint,
    fingerprint_factors,
    fingerprint_fully,
)
from llamatrain.run.model import make_model
from llamatrain.run.options import RunFolderOptions
from llamatrain.run.prepare import (
    PreparedRun,
    format_config,
    input_files,
    prepare,
    resolve_peft_folder,
    start_request,
)
from llamatrain.run.profiling import profile, write_trace
from llamatrain.run.rank_roles import CheckpointSink, FollowerCheckpointer, NullListener, RankZeroCheckpointer
from llamatrain.run.request import RunRequest
from llamatrain.run.resume import ResumePoint
from llamatrain.run.run_log import open_metrics, open_page
from llamatrain.run.signals import Interrupts
from llamatrain.run.summary import describe_run, join_settings, log_best, log_end
from llamatrain.run.trainable import Trainable
from llamatrain.train.config import DONE, StopReason
from llamatrain.train.loop import Loop


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a run."""

    stop: StopReason
    folder: Path
    result: Path
    steps: int  # in all
    best: Path | None = None  # what came of it at its best validation
    notes: tuple[str, ...] = ()  # warnings and notes that were printed


def train(request: RunRequest, interrupts: Interrupts) -> RunResult:
    """Train as requested, and print how the run ended."""
    with request.naming_sources(), profile(request.config.run.profile, interrupts):
        return train_run(request, interrupts)


def train_run(request: RunRequest, interrupts: Interrupts) -> RunResult:
    """Train as requested, on all ranks."""
    get_comm().assert_equal_on_all({"options": request.config.plain()})
    with phase("files"):
        config, inputs, notes = start_request(request)
    folder_options = request.folder_options
    if config.tune.only_write_lora or folder_options.only_write_model:
        return write_only(config, inputs, request, interrupts)
    if get_comm().rank:
        return run_follower(config, inputs, notes, request, interrupts)
    with open_folder(config.command, folder_options, inputs) as folder:
        interrupts.on_exit = folder.undo
        with interrupts:
            try:
                config, peft, peft_notes = resolve_peft_folder(config, inputs, folder, request)
                extra_outputs, stored_outputs, more_notes = drop_unnamed(
                    config.outs, request.given, folder.path, inputs.resume_point
                )
                if extra_outputs.files_by_option:
                    check_extra_outputs(
                        extra_outputs,
                        folder.path,
                        input_files(config, inputs, folder_options.config),
                        inputs.resume_point,
                        folder_options,
                    )
                config, peft_notes = replace(config, outs=stored_outputs), [*peft_notes, *more_notes]
                get_comm().broadcast(RunFolderInfo(config.tune.peft, peft, folder.path))
                prepared = prepare(config, inputs, peft, [*notes, *peft_notes], request.changed)
                compare_ranks(prepared)
                prepare_folder(prepared, folder, folder_options.config)
                return run_rank_zero(prepared, folder, interrupts, extra_outputs, folder_options.verbose)
            finally:
                folder.undo()


@dataclass(frozen=True)
class RunFolderInfo:
    """Facts about the run's folder that rank 0 sends to the others."""

    stored_peft: Path | None  # as PEFT's folder
    peft: Path | None  # where that is one to be written
    folder: Path


def run_follower(
    config: RunConfig, inputs: RunInputs, notes: list[str], request: RunRequest, interrupts: Interrupts
) -> RunResult:
    """Train on another rank than the first, which writes the folder."""
    with interrupts:
        info = get_comm().broadcast(RunFolderInfo(None, None, Path()))
        config = replace(config, tune=replace(config.tune, peft=info.stored_peft))
        prepared = prepare(config, inputs, info.peft, notes, request.changed)
        compare_ranks(prepared)
        listener, programs = NullListener(), build_programs(prepared)
        loop = build_loop(prepared, programs, listener, interrupts)
        sink = FollowerCheckpointer(programs, get_comm())
        loop.save, loop.save_best = sink.save, sink.keep_best
        with get_comm().watch(prepared.config.run.timeout, lambda: resume_command(prepared, info.folder)):
            stop = run_loop(loop, prepared.data.rows, sink, lambda: prepared.compile_validation(programs))
            sink.end(loop.state)
    result = info.folder / prepared.trainable.result_name
    return RunResult(stop=stop, folder=info.folder, result=result, steps=loop.state.counters.step)


def compare_ranks(prepared: PreparedRun) -> None:
    """Raise on all ranks if they are about to do different things."""
    if get_comm().size == 1:
        return
    inputs, data, config = prepared.inputs, prepared.data, prepared.config
    base, teacher = inputs.base, inputs.teacher
    facts = {
        "kernels": kernel_class(config.train.kernels),
        "base": run_once_per_value(file_identity(base), lambda: fingerprint_fully(base)) if base else None,
        "teacher": run_once_per_value(file_identity(teacher), lambda: fingerprint_fully(teacher))
        if teacher
        else None,
        "adapters": fingerprint_factors(inputs.merged_factors),
        "checkpoint": read_stored_checksum(inputs.resume_point.path) if inputs.resume_point else None,
        "data": data.rows.state.fingerprint,
        "validation": data.validation.state.fingerprint if data.validation else None,
        "way": {name: getattr(config.train, name) for name in ("batch", "grad_acc", "grad_groups", "remat")},
    }
    get_comm().assert_equal_on_all(facts)


def write_only(
    config: RunConfig, inputs: RunInputs, request: RunRequest, interrupts: Interrupts
) -> RunResult:
    """Write the result of a checkpoint, without training."""
    folder_options = request.folder_options
    (resume_point, product) = checkpoint_to_write(inputs, request.folder_options)
    if get_comm().size > 1:
        raise UsageError(
            f"--only-write-{product} needs a single process (got {get_comm().size}); start it without "
            "mpiexec",
            code="single-process",
        )
    if request.config.run.profile:
        raise UsageError(
            f"--profile has no effect with --only-write-{product}; leave it out", code="unused-option"
        )
    model = make_model(config, inputs, ())
    if folder_options.overwrite and not config.outs.files_by_option:
        raise UsageError(
            f"--overwrite has no effect with --only-write-{product}; name a new folder with --out",
            code="unused-option",
        )
    with open_folder(config.command, folder_options, inputs) as folder:
        extra_options, _, notes = drop_unnamed(config.outs, request.given, folder.path, resume_point)
        extra_outputs = ExtraOutputs(extra_options)
        if is_temporary := bool(extra_outputs.newest and not (folder_options.out or folder_options.resume)):
            folder.replace_run()  # it is for the time of writing
        interrupts.on_exit = folder.undo
        with interrupts:
            try:
                config, peft, peft_notes = resolve_peft_folder(config, inputs, folder, request)
                trainable = choose_trainable(config, model, inputs, peft)
                notes += [*peft_notes, *trainable.notes()]
                for line in notes:
                    log_line(f"note: {line}")
                if extra_options.files_by_option:
                    inputs_read = input_files(
                        replace(config, files=(), data=DataOptions()), inputs, folder_options.config
                    )
                    check_extra_outputs(extra_options, folder.path, inputs_read, resume_point, folder_options)
                write_result(resume_point, trainable, folder, extra_outputs)
            finally:
                folder.undo()
    if is_temporary:
        with suppress(OSError):  # there are others in it
            folder.path.parent.rmdir()
    files = (
        extra_outputs.newest if is_temporary else [folder.path / trainable.result_name, *extra_outputs.newest]
    )
    log_end(product, files, StopReason(DONE))
    return RunResult(
        stop=StopReason(DONE),
        folder=folder.path,
        result=files[0],
        steps=resume_point.step,
        notes=tuple(notes),
    )


def write_result(
    resume_point: ResumePoint, trainable: Trainable, folder: RunFolder, extra_outputs: ExtraOutputs
) -> None:
    """Write the result of a checkpoint as it is."""
    names = trainable.make_weights("off").trainable
    check_weights(resume_point, names)
    with verify_unchanged(resume_point.checkpoint.files):
        parts = {name: np.array(resume_point.checkpoint.weights[name]) for name in names}
    trainable.write_result(folder.result_path(trainable.result_name), parts)
    extra_outputs.write(resume_point.step, resume_point.path, folder.result_path(trainable.result_name))
    trainable.write_extra(parts)


def checkpoint_to_write(inputs: RunInputs, folder_options: RunFolderOptions) -> tuple[ResumePoint, str]:
    """Return the checkpoint, and "model" or "adapter", whichever is to be written."""
    resume_point = inputs.resume_point
    option, product = (
        ("only_write_model", "model") if folder_options.only_write_model else ("only_write_lora", "adapter")
    )
    if resume_point is None:
        raise UsageError(
            f"{format_flag(option)} needs a checkpoint (got the model {folder_options.checkpoint_in})",
            code="no-checkpoint",
        )
    if resume_point.checkpoint.kind != (
        "train_model" if folder_options.only_write_model else "finetune_lora"
    ):
        other = format_flag("only_write_lora" if folder_options.only_write_model else "only_write_model")
        raise UsageError(
            f"{format_flag(option)}: the run of {resume_point.path} makes no {product}; use {other}",
            code="wrong-checkpoint",
        )
    return resume_point, product


# ---- the folder ------------------------------------------------------------


def open_folder(command: str, folder_options: RunFolderOptions, inputs: RunInputs) -> RunFolder:
    """Return a new folder, or that of the run that is resumed."""
    run_folder = inputs.folder if folder_options.resume else None
    if run_folder is None or (
        folder_options.out and os.path.realpath(folder_options.out) != os.path.realpath(run_folder)
    ):
        return RunFolder.create(folder_options.out, command, folder_options.overwrite)
    assert folder_options.resume
    if folder_options.resume.is_file() and any(
        later > inputs.step for later in numbered_checkpoints(run_folder)
    ):
        raise UsageError(
            f"{folder_options.resume}: its folder holds later checkpoints; use --resume {run_folder} "
            "for the newest one, or --out for a new run",
            code="later-checkpoints",
        )
    return RunFolder(run_folder)


def prepare_folder(prepared: PreparedRun, folder: RunFolder, config: Path | None) -> None:
    """Remove what does not belong to the run.

    These are files of a replaced run, or checkpoints later than the resumed one.
    """
    if folder.path == prepared.inputs.folder:
        folder.rewind(prepared.inputs.step)  # past those that are damaged
    else:
        folder.replace_run(input_files(prepared.config, prepared.inputs, config))


# ---- the run ---------------------------------------------------------------


def run_rank_zero(
    prepared: PreparedRun,
    folder: RunFolder,
    interrupts: Interrupts,
    extra_outputs: ExtraOutputOptions,
    verbose: bool = False,
) -> RunResult:
    """Train a prepared run on rank 0, and write its folder."""
    resolved = prepared.resolved
    trainable = prepared.trainable
    weights = prepared.fitted.weights
    metrics = open_metrics(prepared, folder)

    def resume() -> str:  # as the folder is called by then
        return resume_command(prepared, folder.path)

    console = None if is_verbose() else null_console()
    every = prepared.config.run.report_every or (1 if verbose else None)
    with Report(metrics, iters=resolved.iters, every=every, console=console) as report:
        report.page = page = open_page(prepared, folder, metrics)
        options = [("options", join_settings(format_config(prepared.config)))] if verbose else []
        report.print_header(
            [*describe_run(prepared, folder.path), *options], prepared.fitted.plan.breakdown.total
        )
        for line in prepared.notes:
            report.log(f"note: {line}")
        programs = build_programs(prepared)
        loop = build_loop(prepared, programs, report, interrupts)
        checkpointer = make_checkpointer(prepared, loop, folder, report, extra_outputs)
        sink: CheckpointSink = (
            RankZeroCheckpointer(checkpointer, get_comm()) if get_comm().size > 1 else checkpointer
        )
        loop.save, loop.save_best = sink.save, sink.keep_best
        loop.sample = partial(
            prepared.sampler.show, weights=weights, parts=programs.weights.parts, report=report
        )

        def on_start() -> None:
            interrupts.saved_folder = folder.path
            interrupts.on_exit = lambda: log_line(f"interrupted; resume with: {resume()}")

        with get_comm().watch(prepared.config.run.timeout, resume):
            stop = run_loop(
                loop, prepared.data.rows, sink, lambda: prepared.compile_ahead(programs), on_start
            )
            interrupts.saved_folder = folder.path
            prepared.sampler.end(weights, programs.weights.parts, report)
            report.end(folder.path)
            sink.end(loop.state)
        write_trace(prepared.config.command, folder, report.warn)
        page.end(stop.reason)
    result, steps = folder.path / trainable.result_name, loop.state.counters.step
    log_end(result.stem, [result, *checkpointer.extra_outputs.newest], stop, resume())
    best = log_best(loop.state, folder, prepared.config.base if trainable.kind == "finetune_lora" else "")
    for line in (result_notes := list(trainable.notes())):
        log_line(f"note: {line}")
    notes = (*prepared.notes, *report.warnings, *result_notes)
    return RunResult(stop=stop, folder=folder.path, result=result, steps=steps, best=best, notes=notes)


def resume_command(prepared: PreparedRun, folder: Path) -> str:
    """Return the command that resumes the run."""
    config = prepared.config
    return (
        f"llamatrain {config.command} --resume "
        f"{shlex.quote(str(folder))}{format_flags(config.outs, config.tune.peft, folder)}"
    )


def make_checkpointer(
    prepared: PreparedRun, loop: Loop, folder: RunFolder, report: Report, extra_outputs: ExtraOutputOptions
) -> Checkpointer:
    """Return the checkpointer of a run."""
    config = prepared.config
    options, teacher = config.plain(), prepared.inputs.teacher
    extra = {TEACHER: fingerprint(teacher)} if teacher else {}
    return Checkpointer(
        options=options,
        keep=config.run.keep,
        keep_results=config.outs.keep_results,
        extra_outputs=ExtraOutputs(extra_outputs),
        trainable=prepared.trainable,
        metadata=prepared.model.metadata,
        programs=loop.programs,
        minimizer=loop.minimizer,
        folder=folder,
        metrics=report.metrics,
        config=format_config(config).encode("utf-8", "replace"),
        warn=report.warn,
        extra={**extra, SIGNATURE: sign(options)},
        resumed_folder=prepared.inputs.folder,
        report_inputs=loop.input_guard.report,
    )
