"""Assembles a run: from options, or from the run that is gone on with, to everything that the loop is given."""

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
from llamatrain.run.build import loop_of, programs_of, trained_in
from llamatrain.run.checkpointer import Checkpointer, check_trained
from llamatrain.run.choose_trainable import target_of
from llamatrain.run.config import RunConfig
from llamatrain.run.extra_output_options import ExtraOutputOptions
from llamatrain.run.extra_outputs import ExtraOutputs, check, flags_of, named_here
from llamatrain.run.header import facts, in_a_line
from llamatrain.run.inputs import TEACHER, RunInputs, fingerprint, identity_of, print_of_adapters, whole_print
from llamatrain.run.model import model_for
from llamatrain.run.options import RunFolderOptions
from llamatrain.run.prepare import (
    PreparedRun,
    format_config,
    input_files,
    prepare,
    resolve_peft_folder,
    start_request,
)
from llamatrain.run.profiling import keep_trace, profiled
from llamatrain.run.rank_roles import CheckpointSink, FollowerCheckpointer, NullListener, RankZeroCheckpointer
from llamatrain.run.request import RunRequest
from llamatrain.run.resume import ResumePoint
from llamatrain.run.run_log import metrics_of, page_of
from llamatrain.run.signals import Interrupts
from llamatrain.run.summary import tell_best, tell_end
from llamatrain.run.trainable import Trainable
from llamatrain.train.config import DONE, StopReason
from llamatrain.train.loop import Loop


@dataclass(frozen=True, kw_only=True)
class RunResult:
    outcome: StopReason
    folder: Path
    result: Path
    steps: int  # in all
    best: Path | None = None  # what came of it at its best validation
    notes: tuple[str, ...] = ()  # what was said of it beside its figures


def train(request: RunRequest, interrupts: Interrupts) -> RunResult:
    """The run that is asked for, and in a line or two how it ended, and what is left to do."""
    with request.naming_sources(), profiled(request.config.run.profile, interrupts):
        return trained(request, interrupts)


def trained(request: RunRequest, interrupts: Interrupts) -> RunResult:
    get_comm().assert_equal_on_all({"options": request.config.plain()})
    with phase("files"):
        asked, sources, notes = start_request(request)
    place = request.folder_options
    if asked.tune.only_write_lora or place.only_write_model:
        return written(asked, sources, request, interrupts)
    if get_comm().rank:
        return followed(asked, sources, notes, request, interrupts)
    with folder_of(asked.command, place, sources) as folder:
        interrupts.leaving = folder.undo
        with interrupts:
            try:
                asked, peft, more = resolve_peft_folder(asked, sources, folder, request)
                outs, kept, named = named_here(asked.outs, request.given, folder.path, sources.resumed)
                if outs.said:
                    check(
                        outs, folder.path, input_files(asked, sources, place.config), sources.resumed, place
                    )
                asked, more = replace(asked, outs=kept), [*more, *named]
                get_comm().broadcast(RunFolderInfo(asked.tune.peft, peft, folder.path))
                prepared = prepare(asked, sources, peft, [*notes, *more], request.changed)
                compare(prepared)
                settle(prepared, folder, place.config)
                return run(prepared, folder, interrupts, outs, place.verbose)
            finally:
                folder.undo()


@dataclass(frozen=True)
class RunFolderInfo:
    """What the first rank has found out for all."""

    kept: Path | None  # as PEFT's folder
    peft: Path | None  # where that is one to be written
    folder: Path


def followed(
    asked: RunConfig, sources: RunInputs, notes: list[str], request: RunRequest, interrupts: Interrupts
) -> RunResult:
    """The same run on another rank than the first, which has its folder."""
    with interrupts:
        led = get_comm().broadcast(RunFolderInfo(None, None, Path()))
        asked = replace(asked, tune=replace(asked.tune, peft=led.kept))
        prepared = prepare(asked, sources, led.peft, notes, request.changed)
        compare(prepared)
        listener, programs = NullListener(), programs_of(prepared)
        loop, keeper = (
            loop_of(prepared, programs, listener, interrupts),
            FollowerCheckpointer(programs, get_comm()),
        )
        loop.save, loop.save_best = keeper.save, keeper.keep_best
        with get_comm().watch(prepared.config.run.timeout, lambda: to_go_on(prepared, led.folder)):
            outcome = trained_in(
                loop, prepared.data.rows, keeper, lambda: prepared.compile_validation(programs)
            )
            keeper.end(loop.state)
    result = led.folder / prepared.trainable.result_name
    return RunResult(outcome=outcome, folder=led.folder, result=result, steps=loop.state.counters.step)


def compare(prepared: PreparedRun) -> None:
    """With what the other ranks are about to do."""
    if get_comm().size == 1:
        return
    sources, data, kept = prepared.inputs, prepared.data, prepared.config
    base, taught_by = sources.base, sources.taught_by
    facts = {
        "kernels": kernel_class(kept.train.kernels),
        "base": run_once_per_value(identity_of(base), lambda: whole_print(base)) if base else None,
        "teacher": run_once_per_value(identity_of(taught_by), lambda: whole_print(taught_by))
        if taught_by
        else None,
        "adapters": print_of_adapters(sources.factors),
        "checkpoint": read_stored_checksum(sources.resumed.path) if sources.resumed else None,
        "data": data.rows.state.fingerprint,
        "validation": data.validation.state.fingerprint if data.validation else None,
        "way": {name: getattr(kept.train, name) for name in ("batch", "grad_acc", "grad_groups", "remat")},
    }
    get_comm().assert_equal_on_all(facts)


def written(asked: RunConfig, sources: RunInputs, request: RunRequest, interrupts: Interrupts) -> RunResult:
    """What comes of a checkpoint, and nothing else."""
    place, (resumed, made) = request.folder_options, written_of(sources, request.folder_options)
    if get_comm().size > 1:
        raise UsageError(
            f"--only-write-{made} is the work of one process, and {get_comm().size} were started"
        )
    if request.config.run.profile:
        raise UsageError(
            f"--profile is of a training, and --only-write-{made} trains nothing; leave one of them out"
        )
    model = model_for(asked, sources, ())
    if place.overwrite and not asked.outs.said:
        raise UsageError(
            f"--only-write-{made} replaces no run: leave --overwrite out, and name a new folder with --out"
        )
    with folder_of(asked.command, place, sources) as folder:
        named, _, notes = named_here(asked.outs, request.given, folder.path, resumed)
        outs = ExtraOutputs(named)
        if alone := bool(outs.newest and not (place.out or place.resume)):
            folder.replace_run()  # it is for the time of writing
        interrupts.leaving = folder.undo
        with interrupts:
            try:
                asked, peft, more = resolve_peft_folder(asked, sources, folder, request)
                target = target_of(asked, model, sources, peft)
                notes += [*more, *target.notes()]
                for line in notes:
                    log_line(f"note: {line}")
                if named.said:
                    reads = input_files(replace(asked, files=(), data=DataOptions()), sources, place.config)
                    check(named, folder.path, reads, resumed, place)
                write_result(resumed, target, folder, outs)
            finally:
                folder.undo()
    if alone:
        with suppress(OSError):  # there are others in it
            folder.path.parent.rmdir()
    files = outs.newest if alone else [folder.path / target.result_name, *outs.newest]
    tell_end(made, files, StopReason(DONE))
    return RunResult(
        outcome=StopReason(DONE), folder=folder.path, result=files[0], steps=resumed.step, notes=tuple(notes)
    )


def write_result(resumed: ResumePoint, target: Trainable, folder: RunFolder, outs: ExtraOutputs) -> None:
    """Write what comes of a checkpoint as it is."""
    trained = target.make_weights("off").trainable
    check_trained(resumed, trained)
    with verify_unchanged(resumed.checkpoint.files):
        parts = {name: np.array(resumed.checkpoint.weights[name]) for name in trained}
    target.write_result(folder.result_path(target.result_name), parts)
    outs.write(resumed.step, resumed.path, folder.result_path(target.result_name))
    target.write_extra(parts)


def written_of(sources: RunInputs, place: RunFolderOptions) -> tuple[ResumePoint, str]:
    """The checkpoint, and what is to be made of it."""
    resumed = sources.resumed
    option, made = ("only_write_model", "model") if place.only_write_model else ("only_write_lora", "adapter")
    if resumed is None:
        raise UsageError(
            f"{format_flag(option)} writes the {made} of a checkpoint, and {place.checkpoint_in} is a model"
        )
    if resumed.checkpoint.kind != ("train_model" if place.only_write_model else "finetune_lora"):
        other = format_flag("only_write_lora" if place.only_write_model else "only_write_model")
        raise UsageError(
            f"{format_flag(option)}: {resumed.path} is of a run that makes no {made}; {other} writes what it makes"
        )
    return resumed, made


# ---- the folder ------------------------------------------------------------


def folder_of(command: str, place: RunFolderOptions, sources: RunInputs) -> RunFolder:
    """A new folder, or the one that the run has."""
    home = sources.home if place.resume else None
    if home is None or (place.out and os.path.realpath(place.out) != os.path.realpath(home)):
        return RunFolder.create(place.out, command, place.overwrite)
    assert place.resume
    if place.resume.is_file() and any(later > sources.step for later in numbered_checkpoints(home)):
        raise UsageError(
            f"{place.resume}: its folder has later checkpoints; --resume {home} takes the newest, --out begins another run"
        )
    return RunFolder(home)


def settle(prepared: PreparedRun, folder: RunFolder, config: Path | None) -> None:
    """Make the folder the run's own."""
    if folder.path == prepared.inputs.home:
        folder.rewind(prepared.inputs.step)  # past those that are damaged
    else:
        folder.replace_run(input_files(prepared.config, prepared.inputs, config))


# ---- the run ---------------------------------------------------------------


def run(
    prepared: PreparedRun,
    folder: RunFolder,
    interrupts: Interrupts,
    outs: ExtraOutputOptions,
    verbose: bool = False,
) -> RunResult:
    resolved, target, leaves, metrics = (
        prepared.resolved,
        prepared.trainable,
        prepared.plan.weights,
        metrics_of(prepared, folder),
    )

    def command() -> str:  # as the folder is called by then
        return to_go_on(prepared, folder.path)

    console, every = (
        None if is_verbose() else null_console(),
        prepared.config.run.report_every or (1 if verbose else None),
    )
    with Report(metrics, iters=resolved.iters, every=every, console=console) as report:
        report.page = page = page_of(prepared, folder, metrics)
        options = [("options", in_a_line(format_config(prepared.config)))] if verbose else []
        report.print_header([*facts(prepared, folder.path), *options], prepared.plan.plan.breakdown.total)
        for line in prepared.notes:
            report.log(f"note: {line}")
        programs = programs_of(prepared)
        loop = loop_of(prepared, programs, report, interrupts)
        saver = saver_of(prepared, loop, folder, report, outs)
        keeper: CheckpointSink = RankZeroCheckpointer(saver, get_comm()) if get_comm().size > 1 else saver
        loop.save, loop.save_best = keeper.save, keeper.keep_best
        loop.sample = partial(
            prepared.sampler.show, leaves=leaves, parts=programs.weights.parts, report=report
        )

        def begun() -> None:
            interrupts.home, interrupts.leaving = (
                folder.path,
                lambda: log_line(f"interrupted; to go on: {command()}"),
            )

        with get_comm().watch(prepared.config.run.timeout, command):
            outcome = trained_in(
                loop, prepared.data.rows, keeper, lambda: prepared.compile_ahead(programs), begun
            )
            interrupts.home = folder.path
            prepared.sampler.end(leaves, programs.weights.parts, report)
            report.end(folder.path)
            keeper.end(loop.state)
        keep_trace(prepared.config.command, folder, report.warn)
        page.end(outcome.reason)
    result, steps = folder.path / target.result_name, loop.state.counters.step
    tell_end(result.stem, [result, *saver.outs.newest], outcome, command())
    best = tell_best(loop.state, folder, prepared.config.base if target.kind == "finetune_lora" else "")
    for line in (told := list(target.notes())):
        log_line(f"note: {line}")
    notes = (*prepared.notes, *report.warnings, *told)
    return RunResult(outcome=outcome, folder=folder.path, result=result, steps=steps, best=best, notes=notes)


def to_go_on(prepared: PreparedRun, folder: Path) -> str:
    kept = prepared.config
    return f"llamatrain {kept.command} --resume {shlex.quote(str(folder))}{flags_of(kept.outs, kept.tune.peft, folder)}"


def saver_of(
    prepared: PreparedRun, loop: Loop, folder: RunFolder, report: Report, outs: ExtraOutputOptions
) -> Checkpointer:
    kept = prepared.config
    options, teacher = kept.plain(), prepared.inputs.taught_by
    extra = {TEACHER: fingerprint(teacher)} if teacher else {}
    return Checkpointer(
        options=options,
        keep=kept.run.keep,
        keep_results=kept.outs.keep_results,
        outs=ExtraOutputs(outs),
        target=prepared.trainable,
        metadata=prepared.model.metadata,
        programs=loop.programs,
        descent=loop.minimizer,
        folder=folder,
        metrics=report.metrics,
        config=format_config(kept).encode("utf-8", "replace"),
        warn=report.warn,
        extra={**extra, SIGNATURE: sign(options)},
        home=prepared.inputs.home,
        tell=loop.input_guard.report,
    )
