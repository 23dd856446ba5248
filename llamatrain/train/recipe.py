"""Assembles a run: from options, or from the run that is gone on with, to everything that the loop is given."""

import os
import shlex
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from llamatrain.config.file import config_text
from llamatrain.data.sources import find_sources
from llamatrain.errors import FileError, MemoryPlanError, UsageError
from llamatrain.files.newfile import NewFile
from llamatrain.optim.lbfgs import Lbfgs, LbfgsOptions
from llamatrain.optim.stop import StopRules
from llamatrain.report.metrics import Metrics
from llamatrain.report.report import Report
from llamatrain.train.begin import Options, Start, gone_on_with, start_of
from llamatrain.train.folder import RunFolder, numbered
from llamatrain.train.interrupts import Interrupts
from llamatrain.train.keeper import Keeper, restore
from llamatrain.train.loop import Loop, Outcome
from llamatrain.train.material import OWN_SIZE, Material, Model, material_of, sine_of
from llamatrain.train.needs import Choice, excess
from llamatrain.train.options import PlaceOptions, idle
from llamatrain.train.programs import Programs
from llamatrain.train.task import Task, filled
from llamatrain.train.tasks import model_for, task_for
from llamatrain.train.watch import Watch
from llamatrain.train.ways import allowed, chosen, resolved, schedule_of, watch_of


@dataclass(frozen=True)
class Finished:
    outcome: Outcome
    result: Path
    command: str  # that goes on with it


@dataclass(frozen=True)
class Prepared:
    """A run that could begin."""

    options: Options
    start: Start
    model: Model
    material: Material
    task: Task
    watch: Watch
    choice: Choice
    notes: tuple[str, ...]


def train(options: Options, place: PlaceOptions, given: Collection[str]) -> Finished:
    start = start_of(place, options.command, options.base)
    notes = list(start.notes)
    if start.checkpoint:
        options, more = gone_on_with(options, start, given)
        notes += more
    options = options.settled()
    with folder_of(options.command, place, start) as folder, Interrupts(folder.discard) as interrupts:
        try:
            prepared = prepare(options, start, notes, given)
            settle(prepared, folder)
            return run(prepared, folder, interrupts)
        finally:
            folder.discard()


def prepare(options: Options, start: Start, notes: list[str], given: Collection[str]) -> Prepared:
    """Everything that can fail, before anything is written."""
    model = model_for(options, start, given)
    task = task_for(options, model, start)
    material = material_of(options.files, model, options.data, options.train.seed)
    options = replace(options, train=resolved(options.train, material.rows.count))
    options = replace(options, model=replace(options.model, ctx=model.row), tune=replace(options.tune, ctx=model.row))
    watch = watch_of(options, model, task, material.sine)
    kept = bool(start.checkpoint and start.checkpoint.options)
    validating = material.validation is not None
    choice = chosen(options, task, material.rows.lengths, validating, watch, goes_on=kept)
    if (told := excess(choice, options.train.memory, allowed(options.train))) is not None:
        raise MemoryPlanError(told)
    if start.checkpoint and start.checkpoint.counters.step >= (options.train.iters or 0):
        notes = [*notes, f"all {options.train.iters} steps are done already; --iters with a larger number goes on"]
    if choice.splits > 1:
        notes = [*notes, f"a batch is run in {choice.splits} parts, to fit the memory"]
    remat, acc = str(choice.policy), options.train.grad_acc * choice.splits
    options = replace(options, train=replace(options.train, remat=remat, batch=choice.setting.batch, grad_acc=acc))
    return Prepared(options, start, model, material, task, watch, choice, tuple(notes))


def planned(options: Options, place: PlaceOptions, given: Collection[str]) -> tuple[Choice, str | None]:
    """How a run would be run, and why it would not, if so; its text is not read, and nothing is written."""
    start = start_of(place, options.command, options.base)
    if start.checkpoint:
        options, _ = gone_on_with(options, start, given)
    if named := [file for file in options.files if file != "-"]:
        find_sources(named)
    model = model_for(options, start, given, read=False)
    task = task_for(options, model, start, read=False)
    sine = None if options.files else sine_of(model, 0).sine
    options = replace(options, train=resolved(options.train, lambda epochs: epochs))
    validating = bool(options.data.val or options.data.val_split)
    choice = chosen(options, task, (model.row,), validating, watch_of(options, model, task, sine), refuse=False)
    return choice, excess(choice, options.train.memory, allowed(options.train))


# ---- the folder ------------------------------------------------------------


def folder_of(command: str, place: PlaceOptions, start: Start) -> RunFolder:
    """A new folder, or the one that the run has."""
    home = start.path.parent if place.resume and start.path else None
    if home is None or (place.out and os.path.realpath(place.out) != os.path.realpath(home)):
        return RunFolder.new(place.out, command, place.overwrite)
    assert place.resume and start.checkpoint
    step = start.checkpoint.counters.step
    if place.resume.is_file() and any(later > step for later in numbered(home)):
        raise UsageError(
            f"{place.resume}: its folder has later checkpoints; --resume {home} takes the newest, --out begins another run"
        )
    return RunFolder(home)


def settle(prepared: Prepared, folder: RunFolder) -> None:
    """Make the folder the run's own."""
    start, options = prepared.start, prepared.options
    if start.checkpoint and start.path and folder.path == start.path.parent:
        folder.rewind(start.checkpoint.counters.step)  # past those that are damaged
    else:
        folder.clear(read_from(options, start))
    unsaid = {*idle(options.train, options.run), *(OWN_SIZE if start.model else ())}
    head = f"llamatrain {options.command}{' BASE.gguf' if options.base else ''} --config FILE"
    text = config_text(head, options.files, list(options.parts.values()), unsaid)
    with NewFile(folder.result("config.toml")) as file:
        file.write(text.encode("utf-8", "replace"))


def read_from(options: Options, start: Start) -> list[Path]:
    """Files that the run reads."""
    named = [options.model.vocab_from, options.tune.lora_init, *(path for path, _ in options.lora.scaled)]
    return [path for path in (*named, start.model and start.model.path, start.path) if path]


@contextmanager
def telling(start: Start) -> Iterator[None]:
    """What a checkpoint says of itself may be nonsense, though its checksum holds."""
    try:
        yield
    except (KeyError, ValueError, TypeError, IndexError, OverflowError) as error:
        raise FileError(f"{start.path}: its state cannot be gone on with: {error!r}") from error


def metrics_of(start: Start, folder: RunFolder) -> Metrics:
    """New, or those of the run so far; in a new folder its first part is told, too."""
    path = folder.result("metrics.jsonl")
    if start.path and (before := start.path.with_name(path.name)).exists() and not path.exists():
        with NewFile(path) as file:
            file.write(before.read_bytes())
    step = start.checkpoint.counters.step if start.checkpoint else 0
    return Metrics.resumed(path, step) if path.exists() else Metrics.fresh(path)


# ---- the run ---------------------------------------------------------------


def run(prepared: Prepared, folder: RunFolder, interrupts: Interrupts) -> Finished:
    options, start, task, choice = prepared.options, prepared.start, prepared.task, prepared.choice
    train, checkpoint = options.train, start.checkpoint
    command = f"llamatrain {options.command} --resume {shlex.quote(str(folder.path))}"
    metrics, iters = metrics_of(start, folder), train.iters or 0
    with Report(metrics, iters=iters, every=options.run.report_every or None) as report:
        report.header(facts(prepared, folder.path))
        for line in prepared.notes:
            report.say(f"note: {line}")
        programs = Programs(choice.graphs, choice.arena, task.frozen)
        parts = programs.weights.parts
        if checkpoint:
            filled(checkpoint, parts)
        else:
            task.begin(parts)
        keeper = Keeper(options, task, prepared.model.metadata, programs, folder, report)
        loop = Loop(
            programs, prepared.material.rows, prepared.material.validation, schedule_of(train),
            StopRules(train.past, train.delta, train.max_no_improvement, train.epsf), options.run, iters, train.grad_acc, report,
            keeper.save, lambda step: prepared.watch.show(step, parts, report), interrupts=interrupts, seed=train.seed,
        )  # fmt: skip
        if train.optimizer == "lbfgs":
            loop.lbfgs = Lbfgs(programs.weights.vector, LbfgsOptions(train.lbfgs_history, train.line_search))
        if checkpoint:
            with telling(start):
                restore(loop, checkpoint, report)
            report.resumed(checkpoint.counters.step)
            done = any("val_loss" in line and line.get("step") == loop.counters.step for line in metrics.lines())
            loop.owed = loop.owed and not done  # a run may be killed between the validation and the next save
        else:
            loop.owed = options.command == "finetune" and options.run.eval_every > 0  # the base's own loss, as line 0
        if options.tune.only_write_lora:
            task.write(folder.result(task.result), parts)
            folder.settled()
            outcome = Outcome("done")
        else:
            loop.saved = keeper.save(loop)  # so that a full disk shows now, and not after an hour
            folder.settled()
            interrupts.leaving = lambda: print(f"interrupted; to go on: {command}", file=sys.stderr, flush=True)
            outcome = loop.train()
            prepared.watch.end(parts, report)
            report.end(folder.path)
    return Finished(outcome, folder.path / task.result, command)


def facts(prepared: Prepared, folder: Path) -> list[tuple[str, str]]:
    train, choice, material, h = prepared.options.train, prepared.choice, prepared.material, prepared.model.h
    batches = f", {train.grad_acc} batches a step" if train.grad_acc > 1 else ""
    rows = f"{train.batch} rows of {max(material.rows.lengths)}{batches}"
    recomputed = "" if str(choice.policy) == "none" else f", recomputing {choice.policy}"
    trained = sum(tensor.size for tensor in prepared.task.trained.values())
    some = f"; an adapter of {trained:,} is trained" if prepared.task.kind == "finetune_lora" else ""
    return [
        ("model", h.describe()),
        ("parameters", f"{h.parameters:,}{some}"),
        ("data", material.described),
        ("training", f"{train.optimizer}, {train.iters} steps of {rows}, {train.precision}, {choice.setting.threads} threads"),
        ("memory", choice.needs.describe() + recomputed),
        ("folder", str(folder)),
    ]
