"""Runs a request: opens the folder, prepares the run, trains, and reports the result."""

import shlex
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from llamatrain.checkpoints.checkpoint import read_stored_checksum
from llamatrain.checkpoints.run_folder import RunFolder
from llamatrain.checkpoints.signature import SIGNATURE, sign
from llamatrain.distributed.comm import get_comm
from llamatrain.distributed.once import run_once_per_value
from llamatrain.engine.device import kernel_class
from llamatrain.engine.profiler import phase
from llamatrain.platform.terminal import is_verbose, log_line
from llamatrain.report.console import null_console
from llamatrain.report.report import Report
from llamatrain.run.build import build_loop, build_programs, open_answers, run_loop
from llamatrain.run.checkpointer import Checkpointer
from llamatrain.run.config import RunConfig
from llamatrain.run.extra_output_options import ExtraOutputOptions
from llamatrain.run.extra_outputs import ExtraOutputs, check_extra_outputs, drop_unnamed, format_flags
from llamatrain.run.folder import open_folder, prepare_folder
from llamatrain.run.hooks import HOOKS
from llamatrain.run.inputs import (
    TEACHER,
    RunInputs,
    file_identity,
    fingerprint,
    fingerprint_factors,
    fingerprint_fully,
)
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
from llamatrain.run.run_log import open_metrics, open_page
from llamatrain.run.signals import Interrupts
from llamatrain.run.summary import RunResult, describe_run, join_settings, log_best, log_end
from llamatrain.run.time_budget import train_in_time
from llamatrain.run.write_only import write_only
from llamatrain.sources.create_in_ollama import create_in_ollama
from llamatrain.train.config import PAUSED
from llamatrain.train.loop import Loop


def train(request: RunRequest, interrupts: Interrupts) -> RunResult:
    """Train as requested, and print how the run ended."""
    with request.naming_sources(), profile(request.config.run.profile, interrupts):
        get_comm().assert_equal_on_all({"options": request.config.plain()})
        return train_in_time(request, partial(train_run, interrupts=interrupts))


def train_run(request: RunRequest, interrupts: Interrupts) -> RunResult:
    """Train as requested, on all ranks."""
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
                prepared = prepare(
                    config, inputs, peft, [*notes, *peft_notes], request.changed, request.hooks
                )
                compare_ranks(prepared)
                prepare_folder(prepared, folder, folder_options.config)
                return run_rank_zero(prepared, folder, interrupts, extra_outputs, folder_options.verbose)
            finally:
                folder.undo()


@dataclass(frozen=True)
class RunFolderInfo:
    """Facts about the run's folder that rank 0 sends to the others."""

    stored_peft: Path | None  # the folder for the PEFT adapter, as the checkpoint stores it
    peft: Path | None  # the same folder, if it is to be written
    folder: Path


def run_follower(
    config: RunConfig, inputs: RunInputs, notes: list[str], request: RunRequest, interrupts: Interrupts
) -> RunResult:
    """Train on another rank than the first, which writes the folder."""
    with interrupts:
        info = get_comm().broadcast(RunFolderInfo(None, None, Path()))
        config = replace(config, tune=replace(config.tune, peft=info.stored_peft))
        prepared = prepare(config, inputs, info.peft, notes, request.changed, request.hooks)
        compare_ranks(prepared)
        listener, programs = NullListener(), build_programs(prepared)
        loop = build_loop(prepared, programs, listener, interrupts)
        sink = FollowerCheckpointer(programs, get_comm())
        loop.save, loop.save_best = sink.save, sink.keep_best
        with (
            get_comm().watch(prepared.config.run.timeout, lambda: resume_command(prepared, info.folder)),
            open_answers(prepared, programs, interrupts, listener.warn) as loop.answers,
        ):
            stop = run_loop(loop, prepared.data.rows, sink, lambda: prepared.compile_validation(programs))
            sink.end(loop.state)
    counters = loop.state.counters
    return RunResult(
        stop=stop,
        folder=info.folder,
        result=info.folder / prepared.trainable.result_name,
        steps=counters.step,
        seconds=counters.seconds,
    )


def compare_ranks(prepared: PreparedRun) -> None:
    """Raise on all ranks if they are about to do different things."""
    if get_comm().size == 1:
        return
    inputs, data, config = prepared.inputs, prepared.data, prepared.config
    base, teacher = inputs.base, inputs.teacher
    facts = {
        "kernels": kernel_class(config.train.processor),
        "base": run_once_per_value(file_identity(base), lambda: fingerprint_fully(base)) if base else None,
        "teacher": run_once_per_value(file_identity(teacher), lambda: fingerprint_fully(teacher))
        if teacher
        else None,
        "adapters": fingerprint_factors(inputs.merged_factors),
        "checkpoint": read_stored_checksum(inputs.resume_point.path) if inputs.resume_point else None,
        "data": data.rows.state.fingerprint,
        "validation": data.validation.state.fingerprint if data.validation else None,
        "data to retain": data.retained.state.fingerprint if data.retained else None,
        "batch plan": {
            name: getattr(config.train, name) for name in ("batch", "grad_acc", "grad_groups", "remat")
        },
    }
    get_comm().assert_equal_on_all(facts)


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

    def resume() -> str:  # the folder may be renamed during the run
        return resume_command(prepared, folder.path)

    console = None if is_verbose() else null_console()
    every = prepared.config.run.report_every or (1 if verbose else None)
    with Report(metrics, iters=resolved.iters, every=every, console=console) as report:
        report.page = page = open_page(prepared, folder, metrics)
        options = [("options", join_settings(format_config(prepared.config)))] if verbose else []
        facts = [] if prepared.hooks.continues else [*describe_run(prepared, folder.path), *options]
        report.print_header(facts, prepared.fitted.plan.total)
        for line in prepared.notes:
            report.log(f"note: {line}")
        programs = build_programs(prepared)
        loop = build_loop(prepared, programs, report, interrupts)
        checkpointer = make_checkpointer(prepared, loop, folder, report, extra_outputs)
        sink: CheckpointSink = (
            RankZeroCheckpointer(checkpointer, get_comm()) if get_comm().size > 1 else checkpointer
        )
        loop.save, loop.save_best = sink.save, sink.keep_best
        loop.sample = partial(prepared.sampler.show, weights=weights, memory=programs.memory, report=report)

        def on_start() -> None:
            interrupts.saved_folder = folder.path
            interrupts.on_exit = lambda: log_line(f"interrupted; resume with: {resume()}")

        with (
            get_comm().watch(prepared.config.run.timeout, resume),
            open_answers(prepared, programs, interrupts, report.warn) as loop.answers,
        ):
            stop = run_loop(
                loop, prepared.data.rows, sink, lambda: prepared.compile_ahead(programs), on_start
            )
            interrupts.saved_folder = folder.path
            if stop.reason != PAUSED:
                prepared.sampler.end(weights, programs.memory, report)
                report.end(folder.path)
            sink.end(loop.state)
        write_trace(prepared.config.command, folder, report.warn)
        page.end(stop.reason)
    counters = loop.state.counters
    ended = RunResult(
        stop=stop,
        folder=folder.path,
        result=folder.path / trainable.result_name,
        steps=counters.step,
        seconds=counters.seconds,
        notes=(*prepared.notes, *report.warnings),
    )
    if stop.reason == PAUSED:
        return ended
    log_end(ended.result.stem, [ended.result, *checkpointer.extra_outputs.newest], stop, resume())
    return announce_result(prepared, ended, loop, folder)


def announce_result(prepared: PreparedRun, ended: RunResult, loop: Loop, folder: RunFolder) -> RunResult:
    """Print what there is to know about the result of a run, and add it to what is returned."""
    config, trainable = prepared.config, prepared.trainable
    base = config.base if trainable.kind == "finetune_lora" else ""
    best = log_best(
        loop.state,
        folder,
        base,
        merges=config.train.quant_aware is not None,
        rewards=config.preference.is_grpo,
    )
    for line in (notes := list(trainable.notes())):
        log_line(f"note: {line}")
    if config.run.ollama:
        result = best or ended.result
        model, adapter = (base, result) if base else (result, None)
        notes.append(create_in_ollama(config.run.ollama, folder.path / "Modelfile", model, adapter))
    return replace(ended, best=best, notes=(*ended.notes, *notes))


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
    extra: dict[str, Any] = {TEACHER: fingerprint(teacher)} if teacher else {}
    extra |= {HOOKS: prepared.hooks.stored} if prepared.hooks.stored else {}
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
