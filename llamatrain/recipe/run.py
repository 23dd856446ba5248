"""Assembles a run: from options, or from the run that is gone on with, to everything that the loop is given."""

import os
import shlex
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llamatrain.adapters import peft
from llamatrain.config.file import config_text
from llamatrain.errors import FileError, UsageError
from llamatrain.files.newfile import NewFile
from llamatrain.machine.printable import printable
from llamatrain.machine.terminal import is_shown, say
from llamatrain.optim.optimizer import Descent
from llamatrain.recipe.asked import Asked
from llamatrain.recipe.header import facts
from llamatrain.recipe.interrupts import Interrupts
from llamatrain.recipe.model import OWN_SIZE, model_for
from llamatrain.recipe.options import PlaceOptions
from llamatrain.recipe.prepare import Prepared, begun, prepare
from llamatrain.recipe.request import Request
from llamatrain.recipe.resume import Resumed
from llamatrain.recipe.saving import Saver, check_trained, filled, restored
from llamatrain.recipe.sources import Sources
from llamatrain.recipe.targets import target_of
from llamatrain.report.metrics import Metrics
from llamatrain.report.report import Report, nobody
from llamatrain.store.folder import RunFolder
from llamatrain.store.names import numbered
from llamatrain.train.loop import DONE, Course, Loop, Outcome
from llamatrain.train.programs import Programs
from llamatrain.train.state import RunState


@dataclass(frozen=True, kw_only=True)
class Finished:
    outcome: Outcome
    folder: Path
    result: Path
    steps: int  # in all
    notes: tuple[str, ...] = ()  # what was said of it beside its figures


def train(request: Request, interrupts: Interrupts) -> Finished:
    """The run that is asked for, and in a line or two how it ended, and what is left to do."""
    with request.telling():
        return trained(request, interrupts)


def trained(request: Request, interrupts: Interrupts) -> Finished:
    asked, sources, notes = begun(request)
    place, given = request.place, request.given
    if asked.tune.only_write_lora:
        return written(asked, sources, place, given, interrupts)
    with folder_of(asked.command, place, sources) as folder:
        interrupts.leaving = folder.discard
        with interrupts:
            try:
                prepared = prepare(asked, sources, peft_folder(asked, sources, folder, place, given), notes, given)
                settle(prepared, folder)
                return run(prepared, folder, interrupts)
            finally:
                folder.discard()


def tell_end(result: Path, outcome: Outcome, to_go_on: str) -> None:
    if not outcome.finished:
        say(f"{outcome.reason}; to go on: {to_go_on}")
        return
    if outcome.reason != DONE:
        say(f"stopped: {outcome.reason}")
    say(f"the {result.stem}: {result}")


def written(asked: Asked, sources: Sources, place: PlaceOptions, given: Collection[str], interrupts: Interrupts) -> Finished:
    """The adapter of a checkpoint, and nothing else."""
    resumed = sources.resumed
    assert resumed
    model = model_for(asked, sources, ())
    if place.overwrite:
        raise UsageError("--only-write-lora replaces no run: leave --overwrite out, and name a new folder with --out")
    with folder_of(asked.command, place, sources) as folder:
        interrupts.leaving = folder.discard
        with interrupts:
            try:
                target = target_of(asked, model, sources, peft_folder(asked, sources, folder, place, given))
                trained = target.leaves("off").trained
                check_trained(resumed, trained)
                target.write(folder.result(target.result), {name: resumed.checkpoint.weights[name] for name in trained})
            finally:
                folder.discard()
    result = folder.path / target.result
    tell_end(result, Outcome(DONE), "")
    return Finished(outcome=Outcome(DONE), folder=folder.path, result=result, steps=resumed.step)


# ---- the folder ------------------------------------------------------------


def folder_of(command: str, place: PlaceOptions, sources: Sources) -> RunFolder:
    """A new folder, or the one that the run has."""
    home = sources.home if place.resume else None
    if home is None or (place.out and os.path.realpath(place.out) != os.path.realpath(home)):
        return RunFolder.new(place.out, command, place.overwrite)
    assert place.resume
    if place.resume.is_file() and any(later > sources.step for later in numbered(home)):
        raise UsageError(
            f"{place.resume}: its folder has later checkpoints; --resume {home} takes the newest, --out begins another run"
        )
    return RunFolder(home)


def peft_folder(asked: Asked, sources: Sources, folder: RunFolder, place: PlaceOptions, given: Collection[str]) -> Path | None:
    """The folder for PEFT replaces nothing that is read or was not asked for; that of another run is left to it."""
    path = asked.tune.peft
    elsewhere = sources.home is not None and folder.path != sources.home
    if path is None or (elsewhere and "peft" not in given):
        return None
    for read in asked.adapters:
        if os.path.realpath(read) == os.path.realpath(path):
            raise UsageError(f"--peft {path} would replace {read}, which is being read: another name will do")
    peft.check_place(path)
    kept = peft_before(sources.resumed)
    own = not elsewhere and kept is not None and os.path.realpath(kept) == os.path.realpath(path)
    if not own and not place.overwrite and any((path / name).exists() for name in (peft.CONFIG, peft.WEIGHTS, peft.PICKLE)):
        or_replaced = "" if place.resume else ", --overwrite replaces it"
        raise FileError(f"{path}: there is an adapter already; another --peft leaves it alone{or_replaced}")
    return path


def peft_before(resumed: Resumed | None) -> str | None:
    before = resumed.checkpoint.options.get("tune") if resumed else None
    kept = before.get("peft") if isinstance(before, dict) else None
    return kept if isinstance(kept, str) else None


def settle(prepared: Prepared, folder: RunFolder) -> None:
    """Make the folder the run's own."""
    sources, kept = prepared.sources, prepared.kept
    if folder.path == sources.home:
        folder.rewind(sources.step)  # past those that are damaged
    else:
        base, resumed = sources.base, sources.resumed
        named = [kept.model.vocab_from, *kept.adapters, base and base.path, resumed.path if resumed else None]
        folder.clear([path for path in named if path])
    with NewFile(folder.result("config.toml")) as file:
        file.write(config_of(kept).encode("utf-8", "replace"))


def config_of(kept: Asked) -> str:
    """A file that says the same run again."""
    new = kept.command == "from-scratch"
    unsaid = {*kept.idle, *(OWN_SIZE if new and kept.base else ()), "max_time"}  # that was for the process it was given to
    first = f" --checkpoint-in {shlex.quote(kept.base)}" if new and kept.base else ""
    head = f"llamatrain {kept.command}{first} --config FILE"
    return config_text(printable(head, "utf-8"), kept.files, list(kept.parts.values()), unsaid, base="" if new else kept.base)


@contextmanager
def telling(resumed: Resumed) -> Iterator[None]:
    """What a checkpoint says of itself may be nonsense, though its checksum holds."""
    try:
        yield
    except (KeyError, ValueError, TypeError, IndexError, OverflowError) as error:
        raise FileError(f"{resumed.path}: its state cannot be gone on with: {error!r}"[:200]) from error


def metrics_of(sources: Sources, folder: RunFolder) -> Metrics:
    """New, or those of the run so far; in a new folder its first part is told, too."""
    path = folder.result("metrics.jsonl")
    if sources.home and (before := sources.home / path.name).exists() and not path.exists():
        with NewFile(path) as file:
            file.write(before.read_bytes())
    return Metrics.resumed(path, sources.step) if path.exists() else Metrics.fresh(path)


# ---- the run ---------------------------------------------------------------


def run(prepared: Prepared, folder: RunFolder, interrupts: Interrupts) -> Finished:
    resolved, target, metrics = prepared.resolved, prepared.target, metrics_of(prepared.sources, folder)
    command = f"llamatrain {prepared.kept.command} --resume {shlex.quote(str(folder.path))}"
    console, every = None if is_shown() else nobody(), prepared.kept.run.report_every or None
    with Report(metrics, iters=resolved.iters, every=every, console=console) as report:
        report.header(facts(prepared, folder.path))
        for line in prepared.notes:
            report.say(f"note: {line}")
        loop = loop_of(prepared, folder, report, interrupts)
        loop.saved = loop.save(loop.state)  # so that a full disk shows now, and not after an hour
        folder.settled()
        interrupts.home, interrupts.leaving = folder.path, lambda: say(f"interrupted; to go on: {command}")
        outcome = loop.train()
        prepared.samples.end(loop.programs.weights.parts, report)
        report.end(folder.path)
    result, steps = folder.path / target.result, loop.state.counters.step
    tell_end(result, outcome, command)
    notes = (*prepared.notes, *report.warnings)
    return Finished(outcome=outcome, folder=folder.path, result=result, steps=steps, notes=notes)


def loop_of(prepared: Prepared, folder: RunFolder, report: Report, interrupts: Interrupts) -> Loop:
    """Its memory taken and filled, where the run begins or goes on."""
    way, leaves, target, data = prepared.fitted.way, prepared.fitted.leaves, prepared.target, prepared.data
    resumed, kept, course = prepared.sources.resumed, prepared.kept, prepared.resolved.course(way.splits)
    target.load(leaves)
    programs = Programs(way.graphs, way.arena, leaves.frozen)
    parts = programs.weights.parts
    if resumed:
        filled(resumed.checkpoint, parts)
    else:
        target.begin(parts)
    descent = prepared.resolved.optimizer.descent(programs.weights.vector)
    saver = Saver(
        options=kept.plain(),
        keep=kept.run.keep,
        target=target,
        metadata=prepared.model.metadata,
        programs=programs,
        descent=descent,
        folder=folder,
        flush=report.metrics.flush,
    )
    return Loop(
        programs=programs,
        rows=data.rows,
        validation=data.validation,
        course=course,
        listener=report,
        save=saver.save,
        show=lambda step: prepared.samples.show(step, leaves, parts, report),
        state=state_of(prepared, programs, descent, course, report),
        signals=interrupts,
        descent=descent,
    )


def state_of(prepared: Prepared, programs: Programs, descent: Descent | None, course: Course, report: Report) -> RunState:
    """Where it begins: at nothing, or where a checkpoint was, whose vectors and rows are put back."""
    resumed, rows = prepared.sources.resumed, prepared.data.rows
    if not resumed:  # the base's own loss is line 0
        return RunState(data=rows.state, owed=prepared.kept.command == "finetune" and course.eval_every > 0)
    with telling(resumed):
        state, warnings = restored(resumed.checkpoint, programs, descent, rows, course.grad_acc)
    for line in warnings:
        report.warn(line)
    report.resumed(resumed.step)
    gone_on(state, resumed, course.iters, report.metrics)
    return state


def gone_on(state: RunState, resumed: Resumed, iters: int, metrics: Metrics) -> None:
    """More steps are taken after a stop rule has ended a run; a validation is not told twice."""
    if iters > iters_of(resumed):
        state.ended = None
    done = any("val_loss" in line and line.get("step") == resumed.step for line in metrics.lines())
    state.owed = state.owed and not done  # a run may be killed between the validation and the next save


def iters_of(resumed: Resumed) -> int:
    train = resumed.checkpoint.options.get("train")
    iters = train.get("iters") if isinstance(train, dict) else None
    return iters if isinstance(iters, int) else 0
